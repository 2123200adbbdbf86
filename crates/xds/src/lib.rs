//! Envoy's xDS types, and the server and client of the discovery protocol.
//!
//! Resources are opaque in this crate: a type, a name, a version and bytes. The control plane compiles them,
//! and the proxy applies them. [`server`] serves them to any xDS client; [`client`] subscribes to resources
//! of any xDS server. Both support the incremental and the state-of-the-world form of the protocol, over one
//! aggregated stream.
//!
//! Modules in the order of the data flow:
//! - [`resource`]: resources as they are served.
//! - `aliases`: names by which virtual hosts are found.
//! - [`layer`]: resources and their changes.
//! - [`interest`]: selects the streams that a change may concern.
//! - `digits`: numbers as text.
//! - `wire`: messages as bytes.
//! - [`limits`]: limits of the memory and CPU time that a client may use.
//! - [`grpc`]: gRPC calls over one connection.
//! - [`server`] and [`client`]: the discovery service.
//! - [`certificates`]: Istio's certificate service.

mod aliases;
pub mod certificates;
pub mod client;
mod digits;
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
pub use skysail_proto::{Codec, DecodeError, envoy, istio};
