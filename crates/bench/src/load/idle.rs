//! Connections that were used once and then rest.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context as _, bail};

use crate::{
    http1,
    stream::{Stream, Tls},
};

/// Held connections; dropping closes them.
pub(crate) struct Idle {
    target: SocketAddr,
    tls: Option<Tls>,
    streams: Vec<Stream>,
}

impl Idle {
    /// None yet.
    pub(crate) fn new(target: SocketAddr, tls: Option<Tls>) -> Self {
        Self { target, tls, streams: Vec::new() }
    }

    /// Opens connections until there are so many, and has one request answered on each.
    pub(crate) fn grow(&mut self, connections: usize) -> anyhow::Result<()> {
        while self.streams.len() < connections {
            let opened = used(self.target, self.tls.as_ref());
            self.streams.push(opened.with_context(|| format!("connection {}", self.streams.len() + 1))?);
        }
        Ok(())
    }
}

fn used(target: SocketAddr, tls: Option<&Tls>) -> anyhow::Result<Stream> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let mut stream = Stream::open(target, tls)?;
    stream.socket().set_read_timeout(Some(PATIENCE))?;
    stream
        .write_all(b"GET /echo HTTP/1.1\r\nHost: server.mesh.local\r\nUser-Agent: skysail-bench\r\n\r\n")?;
    let mut input = [0; 4_096];
    let mut filled = 0;
    while filled < input.len() {
        let length = stream.read(&mut input[filled..])?;
        if length == 0 {
            bail!("it was closed");
        }
        filled += length;
        let Some(head) = http1::head(&input[..filled]) else { continue };
        let status = http1::status(&input);
        if status != 200 {
            bail!("the answer is {status}");
        }
        if filled >= head.length + head.content_length.unwrap_or(0) {
            return Ok(stream);
        }
    }
    bail!("the answer to an empty request takes more than {filled} bytes")
}
