//! HTTP/1: the meaning of bytes does not depend on how they arrive, and a forwarded message has the same
//! meaning for the next reader.

use skysail_http::{
    head::{Headers, RequestHead, ResponseHead},
    http1::{BodyDecoder, Framing, HeadLimits, Malformed, Scan, parse},
};
use skysail_proxy::fuzzing;

const LIMITS: HeadLimits = HeadLimits { max_head: 4 * 1024, max_headers: 40, keep_case: true };
/// A forwarded head may be slightly larger than the received one.
const NEXT: HeadLimits = HeadLimits { max_head: 16 * 1024, max_headers: 50, keep_case: false };

/// All messages read from a connection.
#[derive(Debug)]
struct Reading<Head> {
    messages: Vec<Message<Head>>,
    /// Error that stopped reading.
    refused: Option<Malformed>,
    /// Number of unread bytes of an incomplete message.
    rest: usize,
}

#[derive(Debug)]
struct Message<Head> {
    head: Head,
    framing: Framing,
    content: Vec<Vec<u8>>,
    trailers: Option<Headers>,
    /// The end of the message was read.
    complete: bool,
}

/// Common functions of request and response heads.
trait Head: Default + Clone + std::fmt::Debug {
    fn parse(&mut self, bytes: &[u8], limits: &HeadLimits, method: &str) -> Result<Framing, Malformed>;
    fn line(&self) -> String;
    fn headers(&self) -> &Headers;
}

impl Head for RequestHead {
    fn parse(&mut self, bytes: &[u8], limits: &HeadLimits, _: &str) -> Result<Framing, Malformed> {
        parse::request(bytes, limits, self).map(|(framing, _)| framing)
    }

    fn line(&self) -> String {
        format!("{} {:?} {:?}", self.method(), self.authority(), self.path())
    }

    fn headers(&self) -> &Headers {
        self.headers()
    }
}

impl Head for ResponseHead {
    fn parse(&mut self, bytes: &[u8], limits: &HeadLimits, method: &str) -> Result<Framing, Malformed> {
        parse::response(bytes, limits, method, self).map(|(framing, _)| framing)
    }

    fn line(&self) -> String {
        self.status().to_string()
    }

    fn headers(&self) -> &Headers {
        self.headers()
    }
}

/// Parses the requests of a connection. The first two bytes determine where the input is split.
pub fn http1_request(data: &[u8]) {
    let Some((split, bytes)) = data.split_first_chunk::<2>() else { return };
    let whole = read_in_pieces::<RequestHead>(*split, bytes, "GET");
    let mut sent = Vec::new();
    let mut expected = Vec::new();
    for message in whole.messages.into_iter().filter(|message| message.complete) {
        let mut head = message.head.clone();
        let trailers = message.trailers.as_ref();
        let out = fuzzing::request(&mut head, message.framing, &message.content, trailers);
        check_by_another(&out, &head);
        sent.extend_from_slice(&out);
        expected.push(Message { head, ..message });
    }
    same(&expected, &read::<RequestHead>(&[&sent], &NEXT, "GET"), &sent);
}

/// Parses the responses of a connection. The first two bytes determine where the input is split, the third the
/// request method.
pub fn http1_response(data: &[u8]) {
    let Some(([split @ .., method], bytes)) = data.split_first_chunk::<3>() else { return };
    let method = ["GET", "HEAD", "CONNECT"][usize::from(*method) % 3];
    let whole = read_in_pieces::<ResponseHead>(*split, bytes, method);
    let mut sent = Vec::new();
    let mut expected = Vec::new();
    for message in whole.messages.into_iter().filter(|message| message.complete) {
        let mut head = message.head.clone();
        // The client's connection stays open, so the message needs an explicit end.
        let framing = if message.framing == Framing::UntilClose { Framing::Chunked } else { message.framing };
        let trailers = message.trailers.as_ref();
        sent.extend(fuzzing::response(&mut head, framing, method, &message.content, trailers));
        expected.push(Message { head, framing, ..message });
    }
    same(&expected, &read::<ResponseHead>(&[&sent], &NEXT, method), &sent);
}

/// Reads the input whole, in two pieces and byte by byte, and compares the results.
fn read_in_pieces<H: Head>(split: [u8; 2], bytes: &[u8], method: &str) -> Reading<H> {
    let whole = read::<H>(&[bytes], &LIMITS, method);
    let at = usize::from(u16::from_be_bytes(split)) % (bytes.len() + 1);
    let (first, second) = bytes.split_at(at);
    let mut others = vec![read::<H>(&[first, second], &LIMITS, method)];
    if bytes.len() < 512 {
        others.push(read::<H>(&bytes.chunks(1).collect::<Vec<_>>(), &LIMITS, method));
    }
    for other in others {
        assert_eq!(whole.refused.is_some(), other.refused.is_some(), "{}", bytes.escape_ascii());
        if whole.refused.is_none() {
            assert_eq!(whole.rest, other.rest, "{}", bytes.escape_ascii());
        }
        compare(&whole.messages, &other.messages, bytes);
    }
    whole
}

/// Reads messages from pieces, as a connection does.
fn read<H: Head>(pieces: &[&[u8]], limits: &HeadLimits, method: &str) -> Reading<H> {
    let mut reading = Reading { messages: Vec::new(), refused: None, rest: 0 };
    let (mut input, mut scan, mut body) = (Vec::new(), Scan::default(), None);
    for piece in pieces {
        input.extend_from_slice(piece);
        if let Err(malformed) = advance(&mut reading, &mut input, &mut scan, &mut body, limits, method) {
            reading.refused = Some(malformed);
            return reading;
        }
    }
    if let (Some(decoder), Some(last)) = (&mut body, reading.messages.last_mut()) {
        last.complete = decoder.close();
    }
    reading.rest = input.len();
    reading
}

/// Reads as far as the input allows.
fn advance<H: Head>(
    reading: &mut Reading<H>,
    input: &mut Vec<u8>,
    scan: &mut Scan,
    body: &mut Option<BodyDecoder>,
    limits: &HeadLimits,
    method: &str,
) -> Result<(), Malformed> {
    loop {
        if let (Some(decoder), Some(last)) = (&mut *body, reading.messages.last_mut()) {
            let piece = decoder.next(input, limits)?;
            assert!(piece.skip + piece.data <= input.len());
            if piece.data > 0 {
                last.content.push(input[piece.skip..piece.skip + piece.data].to_vec());
            }
            input.drain(..piece.skip + piece.data);
            if decoder.is_done() {
                last.trailers = decoder.trailers(limits)?;
                last.complete = true;
                *body = None;
            } else if piece.data == 0 {
                // The decoder consumes all input, so an empty result means that it needs more.
                assert!(input.is_empty());
                return Ok(());
            }
            continue;
        }
        let Some(end) = scan.end(input, limits)? else { return Ok(()) };
        let mut head = H::default();
        let framing = head.parse(&input[..end], limits, method)?;
        input.drain(..end);
        reading.messages.push(Message { head, framing, content: vec![], trailers: None, complete: false });
        *body = Some(BodyDecoder::new(framing));
    }
}

/// Compares messages, ignoring how their content is split.
fn compare<H: Head>(one: &[Message<H>], other: &[Message<H>], bytes: &[u8]) {
    let context = bytes.escape_ascii();
    assert_eq!(one.len(), other.len(), "{context}");
    for (one, other) in one.iter().zip(other) {
        assert_eq!(one.head.line(), other.head.line(), "{context}");
        assert_eq!(fields(one.head.headers()), fields(other.head.headers()), "{context}");
        assert_eq!(one.framing, other.framing, "{context}");
        assert_eq!(one.content.concat(), other.content.concat(), "{context}");
        let trailers = |message: &Message<H>| message.trailers.as_ref().map(fields).unwrap_or_default();
        assert_eq!(trailers(one), trailers(other), "{context}");
        assert_eq!(one.complete, other.complete, "{context}");
    }
}

/// Checks that forwarded messages are read as the original ones, and nothing else.
fn same<H: Head>(expected: &[Message<H>], reading: &Reading<H>, sent: &[u8]) {
    assert_eq!(reading.refused, None, "sent on: {}", sent.escape_ascii());
    assert_eq!(reading.rest, 0, "sent on: {}", sent.escape_ascii());
    compare(expected, &reading.messages, sent);
}

/// Returns the fields except those that frame a message, which belong to one hop.
fn fields(headers: &Headers) -> Vec<(String, String)> {
    const OWN: [&[u8]; 7] = [
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"upgrade",
        b"host",
    ];
    let text = |bytes: &[u8]| bytes.escape_ascii().to_string();
    let kept = headers.iter().filter(|(name, _)| !OWN.contains(name));
    kept.map(|(name, value)| (text(name), text(value))).collect()
}

/// Parses the head with an independent parser and compares the results.
fn check_by_another(sent: &[u8], head: &RequestHead) {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut fields);
    let parsed = request.parse(sent);
    assert!(matches!(parsed, Ok(httparse::Status::Complete(_))), "{parsed:?}: {}", sent.escape_ascii());
    assert_eq!(request.method, Some(head.method()), "{}", sent.escape_ascii());
    let target = if head.method() == "CONNECT" { head.authority() } else { head.path() };
    assert_eq!(request.path, Some(target), "{}", sent.escape_ascii());
    let framing = |field: &&httparse::Header<'_>| {
        field.name.eq_ignore_ascii_case("content-length")
            || field.name.eq_ignore_ascii_case("transfer-encoding")
    };
    assert!(request.headers.iter().filter(framing).count() <= 1, "{}", sent.escape_ascii());
}
