//! skysail-proxy: the sidecar.
//!
//! Modules stand in the order data flows; a module uses those below it, never those above.

// In which order it starts, and what it shows of itself.
pub(crate) mod app;
pub(crate) mod args;
pub(crate) mod envoy;

pub(crate) mod admin;

// Which configuration and certificates are in force: Envoy's protos become the types of `config`.
pub(crate) mod bootstrap;
pub(crate) mod discovery;
pub(crate) mod remote;
pub(crate) mod secrets;
pub(crate) mod translate;

// Where connections come in, and which filter chain takes them.
pub mod worker;

pub(crate) mod listen;

pub(crate) mod connection;
pub(crate) mod early;

// The story of a request (`serve`, then `story`, `forward`, `exchange`) and of a connection (`tcp`).
pub(crate) mod filters;
pub(crate) mod on_demand;
pub(crate) mod serve;
pub(crate) mod spans;
pub(crate) mod story;
pub(crate) mod tcp;
pub(crate) mod tunnel;

pub(crate) mod forward;
pub(crate) mod mirror;

pub(crate) mod authorization;
pub(crate) mod call;
pub(crate) mod exchange;
pub(crate) mod export;
pub(crate) mod hop;

pub(crate) mod admission;
pub(crate) mod downstream;

pub(crate) mod chains;
pub(crate) mod inspect;
pub mod proxy_protocol;

// How it gets to an endpoint.
pub(crate) mod pick;
pub(crate) mod pool;
pub mod upstream;

// The bytes.
pub mod compress;
pub(crate) mod flow;
pub(crate) mod grpc_web;
pub(crate) mod wire;

pub(crate) mod buffer;
pub mod http1;
pub mod http2;
pub(crate) mod session;
pub(crate) mod socket;
pub(crate) mod splice;
pub(crate) mod timer;

// The decisions: pure and synchronous.
pub mod balance;
pub mod cors;
pub mod fault;
pub(crate) mod grpc;
pub mod headers;
pub mod jwt;
pub mod outlier;
pub mod path;
pub mod policy;
pub(crate) mod retry;
pub mod route;
pub(crate) mod trace;

pub mod matching;

// What is told about it.
pub mod error;
pub mod expression;
pub mod format;
pub mod grpc_status;
pub mod map;
pub(crate) mod notice;
pub mod record;
pub mod telemetry;

// What all of these share.
pub mod config;
pub mod context;
pub(crate) mod drain;
pub mod head;
pub mod overload;
pub mod peer;
pub mod pressure;

pub(crate) mod turns;

#[cfg(feature = "fuzzing")]
pub mod fuzzing;

pub use app::run;
pub use args::Args;
