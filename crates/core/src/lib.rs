//! The definitions that all of Skysail shares: names, SPIFFE ids, fingerprints, logging, printing, limits of
//! connections and files, shutdown, access to admin pages.
//!
//! This crate depends on no other crate of the project and knows no protocol. It holds only what at least two other
//! crates would otherwise define separately.

pub mod confine;
pub mod connections;
pub mod descriptors;
mod fingerprint;
pub mod local;
pub mod logging;
pub mod names;
pub mod shutdown;
pub mod spiffe;
pub mod stdio;
pub mod trim;

pub use fingerprint::fingerprint;
pub use names::{ClusterName, Direction};
pub use spiffe::SpiffeId;
