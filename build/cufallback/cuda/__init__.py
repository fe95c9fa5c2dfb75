"""CUDA facts as data, and pure questions over them: toolkits, drivers, PTX versions, architectures, GPUs."""
