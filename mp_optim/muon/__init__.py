"""Muon and NorMuon: orthogonalized updates of matrices, also of sharded ones."""
