//! Connections that have served one request and are idle.

use std::net::SocketAddr;

use anyhow::Context as _;

use super::sequence;
use crate::stream::{Stream, Tls};

/// Open connections; closed when dropped.
pub(crate) struct Idle {
    target: SocketAddr,
    tls: Option<Tls>,
    streams: Vec<Stream>,
}

impl Idle {
    /// Creates an empty set.
    pub(crate) fn new(target: SocketAddr, tls: Option<Tls>) -> Self {
        Self { target, tls, streams: Vec::new() }
    }

    /// Opens connections up to this number, each with one answered request.
    pub(crate) fn grow(&mut self, connections: usize) -> anyhow::Result<()> {
        while self.streams.len() < connections {
            let opened = self.used();
            self.streams.push(opened.with_context(|| format!("connection {}", self.streams.len() + 1))?);
        }
        Ok(())
    }

    fn used(&self) -> anyhow::Result<Stream> {
        let mut stream = sequence::open(self.target, self.tls.as_ref())?;
        let request = b"GET /echo HTTP/1.1\r\nHost: server.mesh.local\r\nUser-Agent: skysail-bench\r\n\r\n";
        sequence::ask(&mut stream, request, &mut [0; 4_096])?;
        Ok(stream)
    }
}
