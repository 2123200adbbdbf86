//! Definitions that all of Skysail shares: names, nodes, SPIFFE IDs, fingerprints, logging, printing, shutdown,
//! access to admin pages, limits of connections and open files, the system call filter, process groups, regular
//! expressions, and the return of unused memory.
//!
//! This crate depends on no other crate of the project. It holds only definitions that at least two other
//! crates need.

pub mod confine;
pub mod connections;
pub mod descriptors;
mod fingerprint;
pub mod local;
pub mod logging;
pub mod names;
pub mod node;
pub mod process_group;
pub mod re2;
pub mod shutdown;
pub mod spiffe;
pub mod stdio;
pub mod trim;

pub use fingerprint::fingerprint;
pub use names::{ClusterName, Direction};
pub use spiffe::SpiffeId;
