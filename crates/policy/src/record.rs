//! What is known of a request or connection: the one source of metrics, access log and header formats.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde_json::{Map, Value};

use crate::{
    config::{Cluster, Endpoint, listener::Direction},
    error::Flags,
    peer::Peer,
    trace::SpanContext,
};
use skysail_http::head::{RequestHead, ResponseHead};

/// A request or connection, finished or (for header formats) on its way. Filled as things become known; what
/// is not known stays as [`Record::new`] leaves it.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    /// Which side of the conversation this proxy is on.
    pub direction: Direction,
    /// When it began.
    pub start: SystemTime,
    /// How long it took.
    pub duration: Duration,
    /// The status that the client got; 0 for none, and for connections.
    pub status: u16,
    /// Response flags.
    pub flags: Flags,
    /// Response code details; empty for none.
    pub details: &'a str,
    /// Why the downstream connection ended; empty for none.
    pub termination: &'a str,
    /// Why the connection to the upstream failed; empty for none.
    pub upstream_failure: &'a str,
    /// Whether the request is gRPC's.
    pub grpc: bool,
    /// gRPC status, where there was one.
    pub grpc_status: Option<u32>,
    /// gRPC messages that came from the client.
    pub request_messages: u64,
    /// gRPC messages that went to the client.
    pub response_messages: u64,
    /// Bytes of the request's body, or those that came from the client.
    pub bytes_received: u64,
    /// Bytes of the answer's body, or those that went to the client.
    pub bytes_sent: u64,
    /// The same with heads and framing.
    pub wire_received: u64,
    /// The same with heads and framing.
    pub wire_sent: u64,
    /// How many tries there were.
    pub attempts: u32,
    /// The client's end.
    pub downstream: Option<&'a Peer>,
    /// The server's end, once connected.
    pub upstream: Option<&'a Peer>,
    /// The cluster chosen.
    pub cluster: Option<&'a Arc<Cluster>>,
    /// The endpoint chosen.
    pub endpoint: Option<&'a Arc<Endpoint>>,
    /// Where the endpoint is, also where the cluster keeps none (original destination).
    pub upstream_remote: Option<SocketAddr>,
    /// Our end of the connection to it.
    pub upstream_local: Option<SocketAddr>,
    /// What filters found out, by their names.
    pub metadata: Option<&'a Map<String, Value>>,
    /// The route taken; empty for none.
    pub route_name: &'a str,
    /// The address that the client dialled.
    pub downstream_local: Option<SocketAddr>,
    /// The client, `x-forwarded-for` taken into account.
    pub downstream_remote: Option<SocketAddr>,
    /// The other end of the connection.
    pub downstream_direct: Option<SocketAddr>,
    /// The server name that the client asked for in TLS.
    pub server_name: Option<&'a str>,
    /// Where the request stands in its trace.
    pub span: Option<&'a SpanContext>,
}

impl Record<'_> {
    /// Where the endpoint is.
    pub fn upstream_address(&self) -> Option<SocketAddr> {
        self.upstream_remote.or(self.endpoint.map(|endpoint| endpoint.address))
    }

    /// Nothing known yet.
    pub fn new(direction: Direction, start: SystemTime) -> Self {
        Self {
            direction,
            start,
            duration: Duration::ZERO,
            status: 0,
            flags: Flags::NONE,
            details: "",
            termination: "",
            upstream_failure: "",
            grpc: false,
            grpc_status: None,
            request_messages: 0,
            response_messages: 0,
            bytes_received: 0,
            bytes_sent: 0,
            wire_received: 0,
            wire_sent: 0,
            attempts: 0,
            downstream: None,
            upstream: None,
            cluster: None,
            endpoint: None,
            upstream_remote: None,
            upstream_local: None,
            metadata: None,
            route_name: "",
            downstream_local: None,
            downstream_remote: None,
            downstream_direct: None,
            server_name: None,
            span: None,
        }
    }
}

/// What a format is evaluated against. Heads are apart from the record, so that a head can be changed by what
/// is evaluated.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The request or connection.
    pub record: &'a Record<'a>,
    /// The request's head, unless it is a connection.
    pub request: Option<&'a RequestHead>,
    /// The answer's head, once there is one.
    pub response: Option<&'a ResponseHead>,
}
