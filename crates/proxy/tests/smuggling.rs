//! What could be read in two ways: two parties that disagree about where a message ends, or for whom it is, let a
//! client slip one request into another, past every decision made here or into somebody else's connection.
//!
//! Each case is sent through a running proxy to a server that records what reaches it, byte for byte. After each, another
//! client asks for something else: what was left over of the case would show there. The same cases go through Envoy,
//! so that the tables say where the two decide differently.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

#[path = "smuggling/answers.rs"]
mod answers;
#[path = "smuggling/envoy.rs"]
mod envoy;
#[path = "smuggling/fields.rs"]
mod fields;
#[path = "support/envoy.rs"]
mod process;
#[path = "support/program.rs"]
mod program;
#[path = "smuggling/replies.rs"]
mod replies;
#[path = "smuggling/requests.rs"]
mod requests;
#[path = "smuggling/server.rs"]
mod server;
#[path = "smuggling/streams.rs"]
mod streams;
#[path = "smuggling/switches.rs"]
mod switches;
