//! Pods without a cluster: Deployments from YAML as processes in network namespaces of one Linux machine.
//!
//! [`isolate`] creates the namespaces. They keep the host unchanged, and the kernel removes them when the
//! mesh ends. [`mesh`] runs the pods there. [`rundir`] and [`enter`] let other commands find and enter them.
//! [`echo`] is the program that runs for unknown images. [`forward_egress`] is the process that makes
//! connections to the outside. [`log`] bounds and reads the logs of programs.
//!
//! The control plane applies Istio's objects. The sandbox reads only the hosts and ports of ServiceEntries, for DNS,
//! and the settings with which sidecars start (mesh configuration, ProxyConfig).

mod capacity;
mod check;
mod containers;
mod descriptor;
mod dns;
mod drain;
pub mod echo;
mod egress;
pub mod enter;
mod error;
mod external;
mod files;
pub mod forward;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gateways;
pub mod http;
pub mod isolate;
mod links;
pub mod log;
pub mod mesh;
mod mounts;
mod names;
mod networks;
mod objects;
mod offline;
mod plan;
mod pod;
mod ports;
mod process;
mod programs;
pub mod progress;
mod proxy_metadata;
pub mod publish;
mod readiness;
mod rules;
pub mod rundir;
mod scrape;
mod survey;
mod templates;
mod unsupported;
mod volumes;

pub use capacity::Capacity;
pub use check::CheckResult;
pub use egress::forwarder::run as forward_egress;
pub use error::Error;
pub use offline::{Lookup, Offline, OfflinePod};
pub use programs::Settings;
pub use skysail_source::MAX_FILE;
pub use survey::Survey;
pub use templates::refuse_templates;
