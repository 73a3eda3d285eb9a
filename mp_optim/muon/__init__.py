"""Muon and NorMuon: orthogonalized updates of matrices, also of split ones."""
