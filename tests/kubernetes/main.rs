//! Skysail on the cluster that KUBECONFIG names. Without one, the tests say that they are skipped. They need `kubectl`.
//!
//! The API server must reach this machine: at the address in `SKYSAIL_KUBE_HOST`, or at 127.0.0.1.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod authority;
mod cluster;
mod gateways;
mod injection;
mod install;
mod replica;
mod status;
mod traffic;
