//! Ambiguous messages. If two parties disagree about the end or the host of a message, a client can hide one
//! request in another. The hidden request evades every policy or enters another client's connection.
//!
//! Each case is sent through a running proxy to a server that records every byte. After each case another
//! client sends a request, which would reveal left-over bytes. The same cases go through Envoy, so that the
//! tables document where the decisions differ.

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
