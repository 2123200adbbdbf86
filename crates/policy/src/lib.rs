//! Decisions about requests and connections, without IO, and the configuration that they read.

pub mod config;
pub mod state;

pub mod balance;
pub mod cors;
pub mod error;
pub mod expression;
pub mod fault;
pub mod format;
pub mod grpc;
pub mod headers;
pub mod jwt;
pub mod limit;
pub mod matching;
pub mod mutation;
pub mod operators;
pub mod outlier;
pub mod path;
pub mod peer;
pub mod rbac;
pub mod record;
pub mod retry;
pub mod route;
pub mod trace;
