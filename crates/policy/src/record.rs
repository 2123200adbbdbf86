//! The record of a request or connection: the source of metrics, access logs and header values.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde_json::{Map, Value};

use crate::{
    config::{Cluster, Endpoint, cluster::Place, listener::Direction},
    error::Flags,
    peer::Peer,
    trace::SpanContext,
};
use skysail_http::head::{RequestHead, ResponseHead};

/// A request or connection, complete or (for header formats) in progress. A value that is not known yet has the value
/// that [`Record::new`] sets.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    /// Traffic direction of the listener.
    pub direction: Direction,
    /// Start time.
    pub start: SystemTime,
    /// Duration.
    pub duration: Duration,
    /// Status of the response to the client; 0 for none, and for connections.
    pub status: u16,
    /// Response flags.
    pub flags: Flags,
    /// Response code details; empty for none.
    pub details: &'a str,
    /// Reason for the end of the downstream connection; empty for none.
    pub termination: &'a str,
    /// Reason for the failure of the upstream connection; empty for none.
    pub upstream_failure: &'a str,
    /// The request is gRPC.
    pub grpc: bool,
    /// gRPC status, if there is one.
    pub grpc_status: Option<u32>,
    /// Number of gRPC messages from the client.
    pub request_messages: u64,
    /// Number of gRPC messages to the client.
    pub response_messages: u64,
    /// Bytes of the request's body, or bytes received from the client.
    pub bytes_received: u64,
    /// Bytes of the response's body, or bytes sent to the client.
    pub bytes_sent: u64,
    /// As `bytes_received`, including heads and framing.
    pub wire_received: u64,
    /// As `bytes_sent`, including heads and framing.
    pub wire_sent: u64,
    /// Number of upstream attempts.
    pub attempts: u32,
    /// The client.
    pub downstream: Option<&'a Peer>,
    /// The upstream peer, once connected.
    pub upstream: Option<&'a Peer>,
    /// Selected cluster.
    pub cluster: Option<&'a Arc<Cluster>>,
    /// Selected endpoint.
    pub endpoint: Option<&'a Arc<Endpoint>>,
    /// Address of the upstream, also for clusters without endpoints (original destination).
    pub upstream_remote: Option<SocketAddr>,
    /// Local address of the upstream connection.
    pub upstream_local: Option<SocketAddr>,
    /// Dynamic metadata, by filter name.
    pub metadata: Option<&'a Map<String, Value>>,
    /// Name of the selected route; empty for none.
    pub route_name: &'a str,
    /// Original destination address of the client's connection.
    pub downstream_local: Option<SocketAddr>,
    /// Address of the client, with `x-forwarded-for` taken into account.
    pub downstream_remote: Option<SocketAddr>,
    /// Address of the downstream peer.
    pub downstream_direct: Option<SocketAddr>,
    /// SNI of the client.
    pub server_name: Option<&'a str>,
    /// Span of the request.
    pub span: Option<&'a SpanContext>,
}

impl Record<'_> {
    /// Returns the address of the upstream.
    pub fn upstream_address(&self) -> Option<SocketAddr> {
        self.upstream_remote.or(self.endpoint.map(|endpoint| endpoint.address))
    }

    /// Returns the address of the upstream as logs contain it: IP address and port, or the path of a Unix domain
    /// socket.
    pub fn upstream_place(&self) -> Option<Place<'_>> {
        match self.endpoint.map(|endpoint| endpoint.place()) {
            Some(pipe @ Place::Pipe(_)) => Some(pipe),
            _ => self.upstream_address().map(Place::Ip),
        }
    }

    /// Returns a record without known values, except for the direction and the start.
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

/// Input of a format string. The heads are not part of the record, so a head can be changed while the record is
/// borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The request or connection.
    pub record: &'a Record<'a>,
    /// Head of the request; `None` for a connection.
    pub request: Option<&'a RequestHead>,
    /// Head of the response, once there is one.
    pub response: Option<&'a ResponseHead>,
}
