"""Muon and NorMuon: orthogonalized updates of matrices, which may be sharded over ranks."""
