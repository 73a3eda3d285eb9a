"""MultiTenantOptimizer: many adapters, each with its own settings, norm, state and lifetime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mp_optim.checkpoint.commit import sync
from mp_optim.config.setting_checks import nearest
from mp_optim.core import iter_slots
from mp_optim.core.interrupted_step import BrokenOffError
from mp_optim.core.keyed_optimizer import load_checked
from mp_optim.core.slot_state import without_keys
from mp_optim.core.tensors import held_tensor
from mp_optim.host.leases import wait_for_devices
from mp_optim.mixed_precision import MegatronGradScaler, StepResult
from mp_optim.mixed_precision.step import errors_kept, take_steps
from mp_optim.optimizers.base import StackOptimizer
from mp_optim.optimizers.classes import AdamW

_OFFLOADED = "tenant {!r} is offloaded; call restore_tenant({!r}) first"


class TenantError(RuntimeError):
    """One or more tenants failed in :meth:`MultiTenantOptimizer.step`; all others were stepped.

    Attributes:
        errors: exception of each tenant that failed, by name.
        results: result of each tenant that was stepped or skipped, by name.
    """

    def __init__(self, errors: dict[str, Exception], results: dict[str, StepResult]) -> None:
        reasons = "; ".join(f"tenant {name!r}: {error}" for name, error in errors.items())
        super().__init__(f"{reasons}. The other tenants were stepped")
        self.errors, self.results = errors, results


class MultiTenantOptimizer(Mapping[str, StackOptimizer]):
    """One optimizer for many tenants, such as the LoRA adapters of a training server.

    A tenant has its own hyperparameters, gradient norm, clipping limit, skipped steps, step count,
    loss scale and lifetime. A tenant gets the bits of a separate optimizer of its parameters, for
    any order of calls for other tenants.

    ``optimizer[name]`` is the torch optimizer of a tenant, for learning-rate schedulers,
    ``param_groups``, ``last_step`` and ``metrics()``.

    Args:
        kind: class of each tenant's optimizer.
        defaults: arguments of ``kind`` for tenants that do not set them, such as ``lr=1e-4`` or
            ``max_grad_norm=1.0``.

    Raises:
        TypeError: an argument is unknown.
        ValueError: a value is out of range or contradicts another one.
    """

    def __init__(self, kind: type[StackOptimizer] = AdamW, **defaults: Any) -> None:
        of_groups = {"overrides"}  # Without parameters to match, overrides would raise.
        kind([{"params": []}], **without_keys(defaults, of_groups))  # A wrong default raises here.
        self._kind, self._defaults = kind, defaults
        self._tenants: dict[str, StackOptimizer] = {}
        self._files: dict[str, Path | None] = {}
        """The file with the state of each offloaded tenant, by name; None for state in host memory.
        """

    def __getitem__(self, name: str) -> StackOptimizer:
        return self._tenants[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    # -- joining and leaving ----------------------------------------------------------------------

    def add_tenant(
        self,
        name: str,
        params: Iterable[Any],
        *,
        grad_scaler: MegatronGradScaler | None = None,
        **settings: Any,
    ) -> None:
        """Add a tenant. After an error the optimizer has the same tenants as before.

        Args:
            name: a new name.
            params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
            grad_scaler: loss scale of this tenant alone, such as a ``DynamicGradScaler``; None for
                1.
            settings: arguments of ``kind`` that differ from the defaults.

        Raises:
            TypeError: a setting is unknown.
            ValueError: the name is taken, a setting is out of range, or another tenant has a
                parameter with the same memory.
        """
        if name in self._tenants:
            raise ValueError(
                f"name={name!r}: a tenant with this name exists; choose another name, or call "
                f"remove_tenant({name!r}) first"
            )
        with _named(name):
            tenant = self._kind(params, **{**self._defaults, **settings})
            tenant.keep_loss_scale(grad_scaler)
            self._check_owners(tenant)
        self._tenants[name] = tenant

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant, and delete the file of an offloaded tenant.

        Main params and state are freed at once, unless the caller has a reference to
        ``optimizer[name]`` or to a state dict. The parameters keep their values.

        Raises:
            ValueError: there is no such tenant.
        """
        self._tenant(name)
        del self._tenants[name]
        if (path := self._files.pop(name, None)) is not None:
            path.unlink(missing_ok=True)

    # -- steps ------------------------------------------------------------------------------------

    def step(self, names: str | Iterable[str] | None = None) -> dict[str, StepResult]:
        """Step some tenants, each with the gradients of its own parameters.

        If a tenant's gradients hold an inf or nan, only that tenant is skipped. A tenant that
        fails, for example because a hyperparameter is out of range, does not stop the other
        tenants.

        Args:
            names: one or more names; None for all tenants that are not offloaded.

        Returns:
            The result of each tenant by name: whether the step was taken, and the gradient norm
                before clipping.

        Raises:
            ValueError: a name is unknown or given twice, or a tenant is offloaded; no tenant was
                stepped.
            TenantError: some tenants failed; the error has the exception of each. All other tenants
                were stepped.
        """
        alone: dict[str, StackOptimizer] = {}
        together: dict[str, StackOptimizer] = {}
        errors: dict[str, Exception] = {}
        listed = self._listed(names)
        if names is None:
            listed = [name for name in listed if name not in self._files]
        for name, tenant in [(name, self._loaded(name)) for name in listed]:
            with errors_kept(errors, name):
                tenant.begin_step()
                (alone if _has_hooks(tenant) else together)[name] = tenant
        results: dict[str, StepResult] = {}
        try:
            take_steps(together, errors, results)
        finally:
            for name, result in results.items():
                together[name].last_step = result
                together[name]._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        for name, tenant in alone.items():
            with errors_kept(errors, name):
                tenant.step()
                assert tenant.last_step is not None
                results[name] = tenant.last_step
        if errors:
            raise TenantError(errors, results) from next(iter(errors.values()))
        return results

    def zero_grad(self, names: str | Iterable[str] | None = None) -> None:
        """Set the gradients of some tenants to None.

        Args:
            names: one or more names; None for all, also for offloaded tenants.
        """
        for name in self._listed(names):
            self._tenants[name].zero_grad()

    def scale_loss(self, name: str, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale of a tenant; call ``backward`` on the result."""
        return self._tenant(name).scale_loss(loss)

    # -- saving and offloading --------------------------------------------------------------------

    def save_tenant(self, name: str) -> dict[str, Any]:
        """Return the state dict of a tenant, with its loss scale. An optimizer of the class
        ``kind`` loads this dict, too.

        The dict contains the live tensors: clone or save them before the tenant's next step.

        Raises:
            BrokenOffError: the tenant's last step was interrupted.
            ValueError: there is no such tenant, or the tenant is offloaded.
        """
        tenant = self._loaded(name)
        with _named(name):
            return tenant.stack.state_dict()

    def load_tenant(self, name: str, state: dict[str, Any], *, convert: bool = False) -> None:
        """Load a result of :meth:`save_tenant` into a tenant of any name with parameters of the
        same shapes. A refused state changes nothing.

        Load the adapter's weights before this call. If a parameter differs from the loaded main
        param, the parameter is overwritten, with a warning.

        Args:
            name: name of the tenant.
            state: the state dict.
            convert: True to round state to the tenant's dtypes even if that loses bits.

        Raises:
            ValueError: there is no such tenant, the tenant is offloaded, or a shape or setting does
                not fit.
        """
        tenant = self._loaded(name)
        with _named(name):
            tenant.load_state_dict(state, convert=convert)

    def offload_tenant(self, name: str, path: str | os.PathLike[str] | None = None) -> None:
        """Move main params and state of a tenant to host memory or to a file.

        Steps, saves and loads of the tenant raise until :meth:`restore_tenant`. Parameters and
        gradients stay where they are.

        Args:
            name: name of the tenant.
            path: a new file for the state; None for host memory.

        Raises:
            OSError: the file cannot be written; the tenant stays loaded.
            RuntimeError: the call is inside ``with averaged_weights()`` of the tenant.
            ValueError: there is no such tenant, the tenant is offloaded, or the file exists.
        """
        tenant = self._loaded(name)
        with _named(name):
            tenant.step_mark.check_lent("offload_tenant")
            if path is None:
                tenant.offload_to_cpu()
            else:
                _write(Path(path), tenant)
                tenant.drop_engine()
        tenant.step_mark.refusal = _OFFLOADED.format(name, name)
        self._files[name] = None if path is None else Path(path)

    def restore_tenant(self, name: str) -> None:
        """Move main params and state of an offloaded tenant back, and delete its file.

        Parameters that were written meanwhile keep their values.

        Raises:
            OSError: the file cannot be read; the tenant stays offloaded.
            ValueError: there is no such tenant, or the tenant is not offloaded.
        """
        tenant = self._tenant(name)
        if name not in self._files:
            raise ValueError(
                f"name={name!r}: this tenant is not offloaded; leave out the call of restore_tenant"
            )
        path, mark = self._files[name], tenant.step_mark
        refusal, mark.refusal = mark.refusal, ""
        try:
            with _named(name):
                if path is None:
                    tenant.restore_from_cpu()
                else:
                    _read(path, tenant)
        except BaseException:
            mark.refusal = refusal
            raise
        del self._files[name]

    # -- names ------------------------------------------------------------------------------------

    def _tenant(self, name: str) -> StackOptimizer:
        if name not in self._tenants:
            known = list(self._tenants)
            raise ValueError(
                f"name={name!r}: no tenant has this name{nearest(str(name), known)}; call "
                "add_tenant first"
            )
        return self._tenants[name]

    def _loaded(self, name: str) -> StackOptimizer:
        tenant = self._tenant(name)
        if name in self._files:
            raise ValueError(f"name={name!r}: {_OFFLOADED.format(name, name)}")
        return tenant

    def _listed(self, names: str | Iterable[str] | None) -> list[str]:
        """Return the names of existing tenants, each at most once."""
        if names is None:
            return list(self._tenants)
        listed = [names] if isinstance(names, str) else list(names)
        for name in listed:
            self._tenant(name)
        if twice := [name for name in set(listed) if listed.count(name) > 1]:
            raise ValueError(f"names={listed!r}: {twice[0]!r} occurs twice; give each name once")
        return listed

    def _check_owners(self, new: StackOptimizer) -> None:
        """Raise ValueError if a parameter of a new tenant starts at the address of another tenant's
        parameter."""
        places: dict[tuple[torch.device, int], str] = {}
        for slot, param in iter_slots(new.param_groups):
            places[_place(param)] = new.slot_name(slot)
        for owner, tenant in self._tenants.items():
            for slot, param in iter_slots(tenant.param_groups):
                # Tensors without elements have no memory, and all of them have the address 0.
                if held_tensor(param).numel() and (name := places.get(_place(param))) is not None:
                    raise ValueError(
                        f"parameter {name} of the new tenant is also {tenant.slot_name(slot)} of "
                        f"tenant {owner!r}; give each tenant parameters of its own"
                    )


def _place(param: Tensor) -> tuple[torch.device, int]:
    local = held_tensor(param)
    return local.device, id(param) if local.is_meta else local.data_ptr()


def _has_hooks(tenant: StackOptimizer) -> bool:
    """True if a tenant cannot be stepped together with other tenants, because it has hooks or a
    patch of ``step``. The patch of a torch scheduler does not count, because it only sets
    ``_opt_called``."""
    patch = vars(tenant).get("step")
    is_patched = patch is not None and not hasattr(patch, "_wrapped_by_lr_sched")
    own = tenant._optimizer_step_pre_hooks or tenant._optimizer_step_post_hooks
    # Leave out this package's hook, because a step of this package waits for background saves
    # itself.
    of_program = set(_global_optimizer_pre_hooks.values()) - {wait_for_devices}
    return bool(is_patched or own or of_program or _global_optimizer_post_hooks)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Return a context that adds a tenant's name to the message of an error in the block."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = (BrokenOffError, TypeError, ValueError, RuntimeError)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        raise kind(f"tenant {name!r}: {error}") from error


def _write(path: Path, tenant: StackOptimizer) -> None:
    """Write a tenant's state to a new file. After a crash the file is complete or missing."""
    if path.exists():
        raise ValueError(f"path={str(path)!r}: this file exists; choose a new name")
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(tenant.stack.state_dict(), temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def _read(path: Path, tenant: StackOptimizer) -> None:
    """Load a tenant's state from a file and delete the file. The parameters keep their values."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    params = [param for _, param in iter_slots(tenant.param_groups)]
    values = [param.detach().clone() for param in params]
    # Other code may have written the weights since the save. So load with convert=True, which joins
    # remainders with the present weights and does not raise.
    load_checked(tenant, state, convert=True)
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)
    path.unlink()
