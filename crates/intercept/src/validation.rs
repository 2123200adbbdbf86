//! Check that connections are redirected: a connection of this process, made as the sidecar would call its own pod, must
//! arrive at the inbound port.
//!
//! It needs no privilege, only the sidecar's user or group, and it works with any rules that are equivalent to Istio's.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, SockRef, Socket, Type};

use crate::{
    error::Error,
    interception::{DELIVERED_FROM, DELIVERED_FROM_V6},
    rules::Family,
};

/// Time between two connections.
const RETRY: Duration = Duration::from_millis(500);
/// Maximum number of connections that wait at the listener: one's own, and those of others.
const WAITING: i32 = 16;

/// Checks a family until a connection is redirected. Rules that are installed meanwhile are noticed.
///
/// # Errors
/// No connection was redirected within the time limit, or the port is taken.
pub(crate) fn check(family: Family, port: u16, probe_port: u16, limit: Duration) -> Result<(), Error> {
    let [loopback, probed]: [IpAddr; 2] = match family {
        Family::V4 => [Ipv4Addr::LOCALHOST.into(), DELIVERED_FROM.into()],
        Family::V6 => [Ipv6Addr::LOCALHOST.into(), DELIVERED_FROM_V6.into()],
    };
    let probe = SocketAddr::from((probed, probe_port));
    let listener = SocketAddr::from((loopback, port));
    let failed = |cause: String| Error::NotIntercepted { probe, listener, seconds: limit.as_secs(), cause };
    let accepting = listen(listener).map_err(|error| failed(format!("listening there: {error}")))?;
    let end = Instant::now() + limit;
    let mut cause = "it was accepted elsewhere".to_owned();
    loop {
        let connection = connect(loopback, probe);
        if let Err(error) = &connection {
            cause = error.to_string();
        }
        // Also the pause before the next connection, which rules may redirect.
        let pause = Instant::now() + RETRY;
        loop {
            match accept(&accepting, pause.min(end)) {
                Ok(Some(arrived)) if original_destination(&arrived) == Some(probe) => return Ok(()),
                // A connection of another program.
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        if Instant::now() >= end {
            return Err(failed(cause));
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(WAITING)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Connects from a loopback address. Connections from the address of the probe are not redirected.
fn connect(from: IpAddr, to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    // The connection ends by a reset, so it leaves nothing at the port of the sidecar.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect_timeout(&to.into(), RETRY)?;
    Ok(socket)
}

/// Accepts a connection; `None` if there is none until `end`.
fn accept(listener: &TcpListener, end: Instant) -> io::Result<Option<TcpStream>> {
    let left = end.saturating_duration_since(Instant::now());
    let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
    let mut descriptors = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    if poll(&mut descriptors, timeout)? == 0 {
        return Ok(None);
    }
    match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

fn original_destination(stream: &TcpStream) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let v6 = stream.local_addr().is_ok_and(|local| local.is_ipv6());
    let address = if v6 { socket.original_dst_v6() } else { socket.original_dst_v4() };
    address.ok()?.as_socket()
}
