//! HTTP/1.1 (RFC 9112): one request with `connection: close`, or several on a kept connection. The head of a response
//! declares how its body ends.

use std::{io, pin::pin};

use http::{Method, Request, StatusCode};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

use super::{Event, add_lines, not_http};

/// Maximum size of a head or of trailers, in bytes.
const MAX_HEAD: u64 = 256 << 10;
/// Maximum size of a line of a chunked body in bytes: before a chunk, or of the trailers.
const MAX_CHUNK_LINE: u64 = 4 << 10;

/// Framing of a body (RFC 9112, section 6.3).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Chunked,
    Length(u64),
    UntilClose,
}

/// Fields of a response's head.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) status: u16,
    framing: Framing,
    /// True if the server closes the connection after the response.
    closes: bool,
}

/// A connection that is kept for further requests (RFC 9112, section 9.3).
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
    is_open: bool,
}

impl Connection {
    /// Connects to `HOST:PORT`.
    ///
    /// # Errors
    /// When the host is unknown or refuses the connection.
    pub async fn connect(to: &str) -> io::Result<Self> {
        Ok(Self { stream: BufReader::new(TcpStream::connect(to).await?), is_open: true })
    }

    /// Sends a request without a body, passes each step of the response to `on` and returns the status. `head` is the
    /// text of the request; its method is not HEAD. There is no time limit.
    ///
    /// # Errors
    /// When no complete response arrives, or when `on` fails. The connection is unusable after an error.
    pub async fn send(
        &mut self,
        head: &str,
        on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
    ) -> io::Result<u16> {
        self.is_open = false;
        self.stream.write_all(head.as_bytes()).await?;
        let response = receive(&mut self.stream, false, on).await?;
        self.is_open = !response.closes;
        Ok(response.status)
    }

    /// Returns whether the connection can take another request.
    pub fn is_open(&self) -> bool {
        self.is_open
    }
}

pub(super) async fn exchange(
    mut stream: TcpStream,
    request: &Request<()>,
    body: &[u8],
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<u16> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let mut head = format!("{} {path} HTTP/1.1\r\nconnection: close\r\n", request.method()).into_bytes();
    add_lines(&mut head, request.headers());
    on(Event::Request(&head))?;
    let (reading, mut writing) = stream.split();
    let send = async {
        writing.write_all(&head).await?;
        writing.write_all(body).await
    };
    let receive = receive(BufReader::new(reading), request.method() == Method::HEAD, on);
    let (mut send, mut receive) = (pin!(send), pin!(receive));
    let mut sent = false;
    loop {
        tokio::select! {
            response = &mut receive => return response.map(|head| head.status),
            // A server may respond before it has read the body, and close. Otherwise the read shows the error.
            _ = &mut send, if !sent => sent = true,
        }
    }
}

async fn receive(
    mut from: impl AsyncBufRead + Unpin,
    of_head: bool,
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<Head> {
    let mut head = loop {
        let text = read_head(&mut from).await?;
        let head = parse(&text)?;
        on(Event::Head(&text))?;
        if head.status >= 200 || head.status == StatusCode::SWITCHING_PROTOCOLS {
            break head;
        }
    };
    if of_head || head.status < 200 || matches!(head.status, 204 | 304) {
        return Ok(head);
    }
    match head.framing {
        Framing::UntilClose => {
            head.closes = true;
            copy(&mut from, u64::MAX, on).await.map(|_| ())?;
        }
        Framing::Length(length) => whole(&mut from, length, on).await?,
        Framing::Chunked => chunks(&mut from, on).await?,
    }
    Ok(head)
}

async fn read_head(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut from = from.take(MAX_HEAD);
    let mut head = Vec::new();
    loop {
        let start = head.len();
        from.read_until(b'\n', &mut head).await?;
        match &head[start..] {
            b"\r\n" | b"\n" if start > 0 => return Ok(head),
            [.., b'\n'] => {}
            _ if from.limit() == 0 => return Err(not_http("the head is too long")),
            _ if head.is_empty() => {
                let what = "the connection was closed without a response";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
            _ => return Err(not_http("the head ends early")),
        }
    }
}

/// Parses the head of a response.
pub(super) fn parse(head: &[u8]) -> io::Result<Head> {
    let text = String::from_utf8_lossy(head);
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    let code = first.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1));
    let status = code.filter(|code| code.len() == 3).and_then(|code| code.parse().ok());
    let status = status.filter(|status| *status >= 100).ok_or_else(|| not_http("it has no status line"))?;
    let (mut framing, mut closes) = (Framing::UntilClose, first.starts_with("HTTP/1.0"));
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("transfer-encoding") && value.to_ascii_lowercase().contains("chunked") {
            framing = Framing::Chunked;
        } else if name.eq_ignore_ascii_case("content-length") && framing != Framing::Chunked {
            framing = Framing::Length(
                value.trim().parse().map_err(|_| not_http("the content-length is not a number"))?,
            );
        } else if name.eq_ignore_ascii_case("connection") {
            closes |= value.trim().eq_ignore_ascii_case("close");
        }
    }
    Ok(Head { status, framing, closes })
}

/// Passes on up to `limit` bytes and returns their number.
async fn copy(
    from: &mut (impl AsyncBufRead + Unpin),
    limit: u64,
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<u64> {
    let mut done = 0;
    while done < limit {
        let piece = from.fill_buf().await?;
        let length = piece.len().min(usize::try_from(limit - done).unwrap_or(usize::MAX));
        if length == 0 {
            break;
        }
        on(Event::Body(&piece[..length]))?;
        from.consume(length);
        done += length as u64;
    }
    Ok(done)
}

async fn whole(
    from: &mut (impl AsyncBufRead + Unpin),
    length: u64,
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let got = copy(from, length, on).await?;
    if got < length {
        let what = format!("the body ended after {got} of {length} bytes");
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
    }
    Ok(())
}

/// Reads a chunked body and its trailers (RFC 9112, section 7.1).
async fn chunks(
    from: &mut (impl AsyncBufRead + Unpin),
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<()> {
    loop {
        let line = read_line(from).await?;
        let size = line.split(';').next().unwrap_or_default().trim();
        let size =
            u64::from_str_radix(size, 16).map_err(|_| not_http("the size of a chunk is not a number"))?;
        if size == 0 {
            break;
        }
        whole(from, size, on).await?;
        if !read_line(from).await?.is_empty() {
            return Err(not_http("a chunk is longer than its size"));
        }
    }
    let mut trailers = Vec::new();
    loop {
        let line = read_line(from).await?;
        trailers.extend_from_slice(line.as_bytes());
        trailers.extend_from_slice(b"\r\n");
        if line.is_empty() {
            break;
        }
        if trailers.len() as u64 > MAX_HEAD {
            return Err(not_http("the trailers are too long"));
        }
    }
    if trailers == b"\r\n" { Ok(()) } else { on(Event::Trailers(&trailers)) }
}

/// Reads a line without its line break.
async fn read_line(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<String> {
    let mut line = Vec::new();
    from.take(MAX_CHUNK_LINE).read_until(b'\n', &mut line).await?;
    match line.strip_suffix(b"\n") {
        Some(line) => Ok(String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line)).into_owned()),
        None if line.len() as u64 == MAX_CHUNK_LINE => Err(not_http("a line of the body is too long")),
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the body ended early")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Returns the status, the body and the trailers, or the error.
    async fn read(response: &[u8], of_head: bool) -> Result<(u16, String, String), String> {
        let (mut heads, mut body, mut trailers) = (0, Vec::new(), Vec::new());
        let mut on = |event: Event<'_>| {
            match event {
                Event::Head(_) => heads += 1,
                Event::Body(piece) => body.extend_from_slice(piece),
                Event::Trailers(lines) => trailers.extend_from_slice(lines),
                Event::Connected(_) | Event::Request(_) => {}
            }
            Ok(())
        };
        let response = receive(response, of_head, &mut on).await.map_err(|error| error.to_string())?;
        assert!(heads > 0);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ok((response.status, text(body), text(trailers)))
    }

    #[tokio::test]
    async fn a_body_ends_as_the_head_declares() {
        for (response, status, body, trailers) in [
            (&b"HTTP/1.0 503 Service Unavailable\r\na: b\r\n\r\nno\r\n\r\n"[..], 503, "no\r\n\r\n", ""),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabcd", 200, "ab", ""),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, "", ""),
            (b"HTTP/1.1 204 No Content\r\n\r\nleft", 204, "", ""),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n1\r\nd\r\n0\r\nx: y\r\n\r\n",
                200,
                "abcd",
                "x: y\r\n\r\n",
            ),
        ] {
            let expected = (status, body.to_owned(), trailers.to_owned());
            assert_eq!(read(response, false).await.unwrap(), expected);
        }
        let answer = read(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", true).await.unwrap();
        assert_eq!(answer, (200, String::new(), String::new()));
    }

    #[tokio::test]
    async fn incomplete_and_foreign_responses_are_errors() {
        let long = format!("HTTP/1.1 200 OK\r\na: {}\r\n\r\n", "b".repeat(300_000));
        for (response, problem) in [
            (&b""[..], "closed without a response"),
            (b"SSH-2.0-OpenSSH\r\n\r\n", "no status line"),
            (b"HTTP/1.1 200 OK\r\na: b", "the head ends early"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", "after 2 of 3 bytes"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "content-length"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "ended early"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n", "longer than its size"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not a number"),
            (long.as_bytes(), "too long"),
        ] {
            let error = read(response, false).await.unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[tokio::test]
    async fn a_connection_is_kept_until_the_server_closes_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tokio::spawn(async move {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            for response in [
                &b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"[..],
                b"HTTP/1.1 204 No Content\r\n\r\n",
                b"HTTP/1.1 503 No\r\nConnection: Close\r\ncontent-length: 0\r\n\r\n",
            ] {
                read_head(&mut stream).await.unwrap();
                stream.write_all(response).await.unwrap();
            }
        });
        let mut connection = Connection::connect(&address).await.unwrap();
        for (status, is_open) in [(200, true), (204, true), (503, false)] {
            let got = connection.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n", &mut |_| Ok(())).await.unwrap();
            assert_eq!((got, connection.is_open()), (status, is_open));
        }
        server.await.unwrap();
    }
}
