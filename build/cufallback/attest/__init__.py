"""Attestations: SBOM, provenance, signatures."""
