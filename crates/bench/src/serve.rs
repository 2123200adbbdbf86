//! The server of every topology: the echo servers of the load generator, on one thread, or `sink`, which reads bytes.
//!
//! It must use little CPU time compared with the sidecars in front of it, and the same for every peer.

mod sink;

use std::{
    convert::Infallible,
    net::{SocketAddr, TcpListener},
};

use anyhow::Context as _;
use skysail_load::server;

use crate::node::Protocol;

/// Arguments of the server.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Address and port to listen on.
    #[arg(long, value_name = "IP:PORT")]
    listen: SocketAddr,

    /// Protocol. `tcp`: bytes are read and not answered; `echo`: they are echoed.
    #[arg(long, value_enum, default_value_t = Protocol::Http1)]
    protocol: Protocol,
}

/// Serves until the process is ended.
pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let listener =
        TcpListener::bind(args.listen).with_context(|| format!("cannot listen on {}", args.listen))?;
    match run_on(args.protocol, listener)? {}
}

/// Serves a protocol on this listener.
pub(crate) fn run_on(protocol: Protocol, listener: TcpListener) -> anyhow::Result<Infallible> {
    match protocol {
        Protocol::Http1 => server::serve_http1(&listener).context("the echo server failed"),
        Protocol::Http2 | Protocol::Grpc => server::serve_http2(listener),
        Protocol::Tcp => sink::serve(&listener).context("the sink failed"),
        Protocol::Echo => server::serve_echo(&listener).context("the echo server failed"),
    }
}
