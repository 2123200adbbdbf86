//! Calls over HTTP/1.1 on kept connections.

use std::{
    cell::RefCell,
    io::{self, ErrorKind, Write as _},
};

use http::uri::Authority;
use skysail_load::response::{Response as Received, ResponseReader};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::graph::model::ServiceCall;

/// Size of a connection's input buffer in bytes. A response's head must fit into it.
const INPUT: usize = 16 << 10;
/// Bytes of bodies.
static FILLER: [u8; 64 << 10] = [b'x'; 64 << 10];

/// A call of a script with its idle connections.
pub(super) struct HttpCall {
    authority: Authority,
    /// Request line and headers, without the empty line.
    head: Vec<u8>,
    size: u64,
    idle: RefCell<Vec<KeptConnection>>,
}

/// A connection that is kept for further calls.
struct KeptConnection {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// Failure of a call.
struct CallFailure {
    error: io::Error,
    /// The server has closed the connection before it sent any byte of the response.
    is_stale: bool,
}

impl HttpCall {
    pub(super) fn new(authority: &Authority, call: &ServiceCall) -> Self {
        let mut head = Vec::new();
        // As in isotope, the method is GET, also with a body. Writing to a Vec cannot fail.
        let _ = write!(head, "GET / HTTP/1.1\r\nHost: {authority}\r\n");
        if call.size > 0 {
            let _ = write!(head, "Content-Length: {}\r\n", call.size);
        }
        for (name, value) in &call.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        Self { authority: authority.clone(), head, size: call.size, idle: RefCell::default() }
    }

    /// Calls the service. Fails unless the status is 200.
    pub(super) async fn call(&self, forwarded: &[u8]) -> Result<(), String> {
        let response = self.exchange(forwarded).await;
        match response {
            Ok(Received { status: 200, .. }) => Ok(()),
            Ok(response) => Err(format!("{} responded with {}\n", self.authority, response.status)),
            Err(error) => Err(format!("cannot call {}: {error}\n", self.authority)),
        }
    }

    async fn exchange(&self, forwarded: &[u8]) -> io::Result<Received> {
        loop {
            let kept = self.idle.borrow_mut().pop();
            let is_kept = kept.is_some();
            let mut connection = match kept {
                Some(connection) => connection,
                None => KeptConnection::open(&self.authority).await?,
            };
            match connection.exchange(&self.head, forwarded, self.size).await {
                Ok(response) => {
                    if !response.closes {
                        self.idle.borrow_mut().push(connection);
                    }
                    return Ok(response);
                }
                // The server has closed the idle connection: the next one is tried, in the end a new one.
                Err(failure) if is_kept && failure.is_stale => {}
                Err(failure) => return Err(failure.error),
            }
        }
    }
}

impl KeptConnection {
    async fn open(authority: &Authority) -> io::Result<Self> {
        let stream = TcpStream::connect(address(authority)).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, input: vec![0; INPUT], output: Vec::new() })
    }

    async fn exchange(&mut self, head: &[u8], forwarded: &[u8], size: u64) -> Result<Received, CallFailure> {
        let stale = |error| CallFailure { error, is_stale: true };
        self.output.clear();
        self.output.extend_from_slice(head);
        self.output.extend_from_slice(forwarded);
        self.output.extend_from_slice(b"\r\n");
        write_message(&mut self.stream, &mut self.output, size).await.map_err(stale)?;
        let (mut reader, mut filled, mut received) = (ResponseReader::new("GET"), 0, false);
        loop {
            let length = self.stream.read(&mut self.input[filled..]).await;
            let length = length.map_err(|error| CallFailure { error, is_stale: !received })?;
            if length == 0 {
                let ended = ErrorKind::UnexpectedEof.into();
                return reader.end().ok_or(CallFailure { error: ended, is_stale: !received });
            }
            received = true;
            filled += length;
            let read = reader.read(&mut self.input, &mut filled).map_err(|invalid| CallFailure {
                error: io::Error::new(ErrorKind::InvalidData, format!("invalid response: {invalid:?}")),
                is_stale: false,
            })?;
            if let Some(mut response) = read {
                // Bytes after the response belong to no request.
                response.closes |= filled > 0;
                return Ok(response);
            }
        }
    }
}

/// Returns the address to connect to: port 80 unless the authority names one.
pub(super) fn address(authority: &Authority) -> (&str, u16) {
    (authority.host(), authority.port_u16().unwrap_or(80))
}

/// Writes a head, which is in `output`, and a body of `size` bytes.
pub(super) async fn write_message(stream: &mut TcpStream, output: &mut Vec<u8>, size: u64) -> io::Result<()> {
    let part = |left: u64| &FILLER[..usize::try_from(left).unwrap_or(FILLER.len()).min(FILLER.len())];
    let first = part(size);
    output.extend_from_slice(first);
    stream.write_all(output).await?;
    let mut left = size - first.len() as u64;
    while left > 0 {
        let next = part(left);
        stream.write_all(next).await?;
        left -= next.len() as u64;
    }
    Ok(())
}
