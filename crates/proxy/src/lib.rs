//! skysail-proxy: the sidecar
