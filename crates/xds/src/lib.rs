//! The wire: Envoy's xDS types and both ends of the discovery protocol.
//!
//! Resources are opaque here: a kind, a name, a version, bytes. What they mean is known to who compiles them
//! and to the proxy that applies them. [`server`] serves them to any xDS client, [`client`] takes them from any
//! xDS server; both speak the delta and the state-of-the-world form over one aggregated stream.
//!
//! Modules in the order of the data: [`resource`] (what is served), `aliases` (the names by which virtual hosts are found), [`layer`] (what changed of it), [`interest`] (and whom that concerns),
//! `wire` (messages as bytes), [`limits`] (what clients may cost), [`grpc`] (calls over one connection), [`server`], [`client`], [`certificates`] (Istio's certificate service).

mod aliases;
pub mod certificates;
pub mod client;
pub mod grpc;
pub mod interest;
pub mod kind;
pub mod layer;
pub mod limits;
pub mod resource;
pub mod server;
mod wire;
mod work;

pub use kind::Kind;
pub use layer::{Changes, Layer, Snapshot};
pub use resource::{Resource, Resources};
pub use skysail_proto::{envoy, istio, otlp};
