//! The least of HTTP that asking for a status page takes: one GET, one connection, the whole answer.
//!
//! HTTP/1.0 is spoken on purpose: its answers are never chunked and end with the connection (RFC 1945).

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

/// No status page is larger than this.
const LONGEST: u64 = 64 << 20;

/// Connects, from this address if one is given.
pub(crate) async fn connect(to: SocketAddr, from: Option<Ipv4Addr>) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if let Some(from) = from {
        socket.bind(SocketAddr::new(IpAddr::V4(from), 0))?;
    }
    socket.connect(to).await
}

/// Asks for a page and returns the status and the body.
///
/// # Errors
/// When there is no answer in time, or none that is HTTP.
pub async fn get(to: SocketAddr, path: &str, limit: Duration) -> io::Result<(u16, String)> {
    get_from(to, None, path, limit).await
}

/// Like [`get`], from a given address.
pub(crate) async fn get_from(
    to: SocketAddr,
    from: Option<Ipv4Addr>,
    path: &str,
    limit: Duration,
) -> io::Result<(u16, String)> {
    let exchange = async {
        let mut stream = connect(to, from).await?;
        let request = format!("GET {path} HTTP/1.0\r\nhost: {to}\r\nuser-agent: skysail\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(LONGEST).read_to_end(&mut answer).await?;
        parse(&String::from_utf8_lossy(&answer))
    };
    tokio::time::timeout(limit, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn parse(answer: &str) -> io::Result<(u16, String)> {
    let not_http = || io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP");
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(not_http)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(not_http)?;
    Ok((status, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart() {
        let (status, body) = parse("HTTP/1.0 503 Service Unavailable\r\na: b\r\n\r\nno\r\n\r\n").unwrap();
        assert_eq!((status, body.as_str()), (503, "no\r\n\r\n"));
        assert!(parse("SSH-2.0-OpenSSH\r\n").is_err());
    }
}
