//! Connections of an attacker, each with its script, on one thread.

use std::{net::SocketAddr, time::Duration};

use crate::{
    control::{
        AUTHORITY,
        connection::Connection,
        message::{Form, Kind, Response, put},
        sidecar::{Plan, Sidecar},
    },
    stream::{Stream, Tls},
};

/// Bytes waiting to be sent below which a script continues.
const MAX_WAITING: usize = 64 << 10;
/// Pause when no data can be sent or read.
const PAUSE: Duration = Duration::from_millis(1);

/// Environment of an attack.
pub(super) struct AttackEnvironment {
    target: SocketAddr,
    tls: Option<Tls>,
    /// Number of concurrent connections.
    pub(super) connections: usize,
    /// Encoded node of the attacker.
    pub(super) node: Vec<u8>,
    /// Encoded names of all endpoints and routes.
    pub(super) endpoint_names: Vec<u8>,
    pub(super) route_names: Vec<u8>,
}

/// Cost of an attack for the attacker.
#[derive(Debug, Default)]
pub(super) struct AttackerCost {
    /// Bytes sent and read.
    pub(super) sent: u64,
    pub(super) read: u64,
    /// Number of connections opened.
    pub(super) opened: u64,
}

/// Behaviour of one connection. Called when responses have arrived, or when fewer than [`MAX_WAITING`] bytes wait to be
/// sent.
pub(super) trait Script {
    fn proceed(&mut self, connection: &mut Connection, responses: Vec<(usize, Response)>);
}

/// Parameters of new connections.
#[derive(Clone, Copy)]
pub(super) struct ConnectionSetup {
    /// Streams per connection.
    pub(super) calls: usize,
    /// Receive window of each stream in bytes.
    pub(super) window: u32,
}

impl AttackEnvironment {
    pub(super) fn new(target: SocketAddr, tls: Option<Tls>, connections: usize, plan: &Plan) -> Self {
        Self {
            target,
            tls,
            connections,
            node: Sidecar::new(0).node(plan),
            endpoint_names: plan.endpoint_names.clone(),
            route_names: plan.route_names.clone(),
        }
    }

    /// Runs a script on each connection until `over` returns true. A closed connection is opened again.
    pub(super) fn run<S: Script>(
        &self,
        setup: ConnectionSetup,
        script: impl Fn() -> S,
        over: impl Fn() -> bool,
    ) -> anyhow::Result<AttackerCost> {
        let mut spent = AttackerCost::default();
        let mut slots: Vec<Option<(Connection, S)>> = (0..self.connections).map(|_| None).collect();
        let mut scratch = vec![0; 64 << 10];
        while !over() {
            let mut idle = true;
            for slot in &mut slots {
                if slot.is_none() {
                    // A refused connection is tried again.
                    let Ok(stream) = Stream::open(self.target, self.tls.as_ref()) else { continue };
                    stream.socket().set_nonblocking(true)?;
                    let (form, authority) = (Form::Delta, AUTHORITY);
                    let connection =
                        Connection::with_window(stream, form, setup.calls, authority, 0, setup.window);
                    spent.opened += 1;
                    *slot = Some((connection, script()));
                }
                let Some((connection, script)) = slot else { continue };
                let before = connection.traffic();
                let alive = turn(connection, script, &mut scratch);
                let after = connection.traffic();
                spent.sent += after.0 - before.0;
                spent.read += after.1 - before.1;
                idle &= before == after;
                if !alive {
                    *slot = None;
                }
            }
            if idle {
                pause();
            }
        }
        Ok(spent)
    }
}

/// Sleeps for [`PAUSE`].
#[allow(clippy::disallowed_methods, reason = "the attacker has a thread of its own")]
pub(super) fn pause() {
    std::thread::sleep(PAUSE);
}

/// Reads, continues the script and writes. Returns false if the server has ended the connection or one of its
/// streams.
fn turn(connection: &mut Connection, script: &mut impl Script, scratch: &mut [u8]) -> bool {
    let mut responses = Vec::new();
    let read = connection.read(scratch, |_, call, response| {
        responses.push((call, response));
        Ok(())
    });
    if read.is_err() {
        return false;
    }
    if !responses.is_empty() || connection.pending() < MAX_WAITING {
        script.proceed(connection, responses);
    }
    connection.flush().is_ok_and(|_| true)
}

/// An incremental request with the fields that attacks use.
#[derive(Default)]
pub(super) struct Request<'a> {
    pub(super) node: &'a [u8],
    pub(super) kind: Option<Kind>,
    /// Encoded names to subscribe to.
    pub(super) names: &'a [u8],
    pub(super) unsubscribe: &'a [&'a str],
    /// Names that the client claims to have.
    pub(super) have: &'a [String],
    pub(super) nonce: &'a [u8],
    pub(super) error: Option<&'a str>,
}

impl Request<'_> {
    /// Encodes the request as a gRPC message.
    pub(super) fn message(&self) -> Vec<u8> {
        let mut out = vec![0; 5];
        if !self.node.is_empty() {
            put(&mut out, 1, self.node);
        }
        put(&mut out, 2, self.kind.unwrap_or(Kind::VirtualHost).url().as_bytes());
        out.extend_from_slice(self.names);
        for name in self.unsubscribe {
            put(&mut out, 4, name.as_bytes());
        }
        for name in self.have {
            let mut entry = Vec::new();
            put(&mut entry, 1, name.as_bytes());
            put(&mut entry, 2, b"1");
            put(&mut out, 5, &entry);
        }
        if !self.nonce.is_empty() {
            put(&mut out, 6, self.nonce);
        }
        if let Some(error) = self.error {
            let mut status = Vec::new();
            put(&mut status, 2, error.as_bytes());
            put(&mut out, 7, &status);
        }
        let length = (out.len() - 5) as u32;
        out[1..5].copy_from_slice(&length.to_be_bytes());
        out
    }
}
