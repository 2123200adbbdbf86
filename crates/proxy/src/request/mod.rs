//! Serves HTTP requests.
//!
//! A request passes these files, in this order:
//!
//! 1. `serve/http1.rs` reads its head from the connection (`serve/http2.rs`: accepts its stream).
//! 2. `phases.rs` runs the phases below, in this order.
//! 3. `routing.rs` prepares the head and finds the route.
//! 4. `on_demand.rs` waits for a virtual host that is not loaded yet.
//! 5. `filters.rs` runs the HTTP filters, in the order of the configuration. It uses these files:
//!    - `limit.rs` takes tokens; `global_limit.rs` calls the rate limit service.
//!    - `mutation.rs` changes headers and buffers bodies.
//!    - `authorization.rs` calls the external authorization service.
//!    - `script.rs` runs Lua scripts, `processing.rs` external processing: for requests and for responses.
//!      `response_body.rs` reads the response for them.
//! 6. `forward.rs` selects an endpoint, connects, sends the request, and retries.
//! 7. `transfer.rs` moves the bytes in both directions.
//! 8. `respond.rs` forwards the response, or sends a local reply.
//! 9. `record.rs` writes metrics, spans and access logs.
//!
//! `context.rs` defines the state that these phases share, `hop.rs` the changes that every hop makes to
//! heads, `processor.rs` the call of an external processor, and `spans.rs` the tracing. Two modules serve special
//! requests: `mirror.rs` sends copies, and `tunnel.rs` forwards the bytes after CONNECT or an upgrade.
//!
//! The modules of this folder form no cycle; `crates/testkit/tests/structure.rs` checks that.

pub(crate) mod serve;

pub(crate) mod phases;

pub(crate) mod on_demand;
pub(crate) mod routing;

pub(crate) mod authorization;
pub(crate) mod filters;
pub(crate) mod global_limit;
pub(crate) mod limit;
pub(crate) mod mutation;
pub(crate) mod script;

pub(crate) mod processing;
pub(crate) mod response_body;

pub(crate) mod forward;
pub(crate) mod mirror;
pub(crate) mod tunnel;

pub(crate) mod respond;
pub(crate) mod transfer;

pub(crate) mod record;

pub(crate) mod context;
pub(crate) mod hop;
pub(crate) mod processor;
pub(crate) mod spans;
