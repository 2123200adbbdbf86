use super::*;
use crate::head::{Headers, RequestHead, ResponseHead};

const LIMITS: HeadLimits = HeadLimits { max_head: 8 * 1024, max_headers: 50, keep_case: false };

/// Result of parsing a sequence of messages: each message's line, framing, content and number of trailer fields; the
/// status of a refusal; the number of bytes that were not parsed.
#[derive(Debug, PartialEq, Eq)]
struct Parsed {
    messages: Vec<(String, Framing, Vec<u8>, usize)>,
    refused: Option<u16>,
    rest: usize,
}

/// Parses requests from pieces, as a connection does.
fn read(pieces: &[&[u8]]) -> Parsed {
    let mut meaning = Parsed { messages: vec![], refused: None, rest: 0 };
    let (mut input, mut scan, mut body) = (Vec::new(), Scan::default(), None::<(BodyDecoder, Vec<u8>)>);
    let mut head = RequestHead::default();
    let mut pieces = pieces.iter();
    loop {
        let result: Result<bool, Malformed> = (|| {
            if let Some((decoder, content)) = &mut body {
                let piece = decoder.next(&input, &LIMITS)?;
                content.extend_from_slice(&input[piece.skip..piece.skip + piece.data]);
                input.drain(..piece.skip + piece.data);
                if decoder.is_done() {
                    let trailers = decoder.trailers(&LIMITS)?.map_or(0, |trailers| trailers.len());
                    let last = meaning.messages.last_mut().unwrap();
                    (last.2, last.3) = (std::mem::take(content), trailers);
                    body = None;
                    return Ok(true);
                }
                return Ok(piece != body::Piece::default());
            }
            let Some(end) = scan.end(&input, &LIMITS)? else { return Ok(false) };
            let (framing, _) = parse::request(&input[..end], &LIMITS, &mut head)?;
            input.drain(..end);
            let line = format!("{} {} {}", head.method(), head.authority(), head.path());
            meaning.messages.push((line, framing, vec![], 0));
            body = Some((BodyDecoder::new(framing), vec![]));
            Ok(true)
        })();
        match result {
            Err(malformed) => {
                meaning.refused = Some(malformed.status);
                return meaning;
            }
            Ok(true) => {}
            Ok(false) => match pieces.next() {
                Some(piece) => input.extend_from_slice(piece),
                None => {
                    meaning.rest = input.len();
                    return meaning;
                }
            },
        }
    }
}

fn refusal(request: &str) -> Option<u16> {
    read(&[request.as_bytes()]).refused
}

#[test]
fn ambiguous_messages_are_refused() {
    let cases = [
        (
            "both lengths",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        ("two lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (
            "equal lengths",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
            400,
        ),
        ("list of lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\n", 400),
        ("signed length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\n", 400),
        ("hex length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\n", 400),
        ("empty length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \r\n\r\n", 400),
        ("huge length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        ("unknown coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        ("two codings", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (
            "chunked twice",
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            501,
        ),
        ("almost chunked", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 501),
        ("vertical tab", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\x0bchunked\r\n\r\n", 400),
        ("chunked in 1.0", "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("space before colon", "GET / HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\n", 400),
        ("folded line", "GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", 400),
        ("space before first field", "GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
        ("bare LF", "GET / HTTP/1.1\nHost: a\n\n", 400),
        ("bare LF between fields", "GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
        ("bare CR in a value", "GET / HTTP/1.1\r\nHost: a\r\nX: b\rTransfer-Encoding: chunked\r\n\r\n", 400),
        ("NUL in a value", "GET / HTTP/1.1\r\nHost: a\r\nX: b\0c\r\n\r\n", 400),
        ("NUL in a name", "GET / HTTP/1.1\r\nHost: a\r\nX\0: b\r\n\r\n", 400),
        ("empty name", "GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n", 400),
        ("no colon", "GET / HTTP/1.1\r\nHost: a\r\nabc\r\n\r\n", 400),
        ("no host", "GET / HTTP/1.1\r\n\r\n", 400),
        ("two hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        ("host with a path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        ("host with user", "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
        ("host list", "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
        ("relative target", "GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("space in target", "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("tab for space", "GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("two spaces", "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("foreign scheme", "GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("connect to a path", "CONNECT /a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("bad method", "G(T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("lower-case version", "GET / http/1.1\r\nHost: a\r\n\r\n", 400),
        ("no version", "GET /\r\nHost: a\r\n\r\n", 400),
        ("bare CR before", "\rGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("line of a bare CR before", "\r\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("version 2", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        ("version 1.10", "GET / HTTP/1.10\r\nHost: a\r\n\r\n", 400),
    ];
    for (what, request, status) in cases {
        assert_eq!(refusal(request), Some(status), "{what}");
    }
}

#[test]
fn invalid_chunks_are_refused() {
    let start = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let cases = [
        ("no size", "\r\n", false),
        ("not hexadecimal", "g\r\n", false),
        ("negative", "-1\r\n", false),
        ("prefixed", "0x5\r\nabcde\r\n", false),
        ("space before", " 5\r\nabcde\r\n0\r\n\r\n", false),
        ("space after", "5 \r\nabcde\r\n0\r\n\r\n", false),
        ("too large", "fffffffffffffffff\r\n", false),
        ("bare LF after size", "5\nabcde\r\n0\r\n\r\n", false),
        ("bare LF in extension", "5;a\nabcde\r\n0\r\n\r\n", false),
        ("bare CR in extension", "5;a\rb\r\nabcde\r\n0\r\n\r\n", false),
        ("content too long", "5\r\nabcdef\r\n0\r\n\r\n", false),
        ("content too short", "5\r\nabcd\r\n0\r\n\r\n", false),
        ("LF after content", "5\r\nabcde\n0\r\n\r\n", false),
        ("framing in trailers", "0\r\nContent-Length: 5\r\n\r\n", false),
        ("host in trailers", "0\r\nHost: b\r\n\r\n", false),
        ("the identity in trailers", "0\r\nX-Forwarded-Client-Cert: URI=a\r\n\r\n", false),
        ("folded trailer", "0\r\nA: b\r\n c\r\n\r\n", false),
        ("bare LF in trailers", "0\r\nA: b\n\r\n", false),
        ("plain", "5\r\nabcde\r\n0\r\n\r\n", true),
        ("upper case", "A\r\n0123456789\r\n0\r\n\r\n", true),
        ("leading zeros", "00005\r\nabcde\r\n000\r\n\r\n", true),
        ("extension", "5;name=value;other=\"x\"\r\nabcde\r\n0;last\r\n\r\n", true),
        ("trailers", "5\r\nabcde\r\n0\r\nX-Sum: 1\r\nX-Other: 2\r\n\r\n", true),
    ];
    for (what, body, taken) in cases {
        let meaning = read(&[start.as_bytes(), body.as_bytes()]);
        assert_eq!(meaning.refused.is_none(), taken, "{what}: {meaning:?}");
        assert_eq!(meaning.rest, 0, "{what}");
    }
    let endless = format!("5;{}", "x".repeat(2_000));
    assert!(read(&[start.as_bytes(), endless.as_bytes()]).refused.is_some());
}

#[test]
fn heads_beyond_the_limits_are_refused() {
    let fields = |count: usize| {
        let fields: String = (0..count).map(|i| format!("x-{i}: y\r\n")).collect();
        format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n")
    };
    assert_eq!(refusal(&fields(49)), None);
    assert_eq!(refusal(&fields(50)), Some(431));
    assert_eq!(refusal(&format!("GET /{} HTTP/1.1\r\n", "a".repeat(9_000))), Some(431));
}

#[test]
fn empty_lines_are_limited() {
    assert_eq!(refusal(&"\r\n".repeat(100)), None);
    assert_eq!(refusal(&"\r\n".repeat(5_000)), Some(431));
}

#[test]
fn four_forms_of_targets_are_parsed() {
    let line = |request: &str| read(&[request.as_bytes()]).messages[0].0.clone();
    assert_eq!(line("GET /a?b HTTP/1.1\r\nhost: x:80\r\n\r\n"), "GET x:80 /a?b");
    assert_eq!(line("GET http://y/a?b HTTP/1.1\r\nhost: x\r\n\r\n"), "GET y /a?b");
    assert_eq!(line("GET http://y?b HTTP/1.1\r\nhost: x\r\n\r\n"), "GET y /?b");
    assert_eq!(line("GET HTTP://y HTTP/1.1\r\nhost: x\r\n\r\n"), "GET y /");
    assert_eq!(line("OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n"), "OPTIONS x *");
    assert_eq!(line("CONNECT z:443 HTTP/1.1\r\nhost: x\r\n\r\n"), "CONNECT z:443 ");
    assert_eq!(line("\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n"), "GET x /");
}

#[test]
fn responses_have_the_framing_of_the_rfc() {
    let framing = |method: &str, text: &str| {
        let mut head = ResponseHead::default();
        parse::response(text.as_bytes(), &LIMITS, method, &mut head).map(|(framing, _)| framing)
    };
    assert_eq!(framing("GET", "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"), Ok(Framing::Length(5)));
    assert_eq!(framing("HEAD", "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"), Ok(Framing::None));
    assert_eq!(framing("GET", "HTTP/1.1 304\r\ncontent-length: 5\r\n\r\n"), Ok(Framing::None));
    assert_eq!(framing("GET", "HTTP/1.1 204 No Content\r\n\r\n"), Ok(Framing::None));
    assert_eq!(framing("GET", "HTTP/1.1 200 OK\r\n\r\n"), Ok(Framing::UntilClose));
    assert_eq!(framing("GET", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"), Ok(Framing::Chunked));
    for bad in [
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
        "HTTP/1.1 2000 OK\r\n\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1  200 OK\r\n\r\n",
        "HTTP/3.1 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    ] {
        assert!(framing("GET", bad).is_err(), "{bad}");
    }
}

#[test]
fn the_result_does_not_depend_on_the_split() {
    let whole = concat!(
        "POST /one HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
        "\r\nGET /two?x=y HTTP/1.1\r\nHost: b\r\nCookie: c=d\r\n\r\n",
        "PUT /three HTTP/1.1\r\nHost: c\r\nTransfer-Encoding: chunked\r\n\r\n",
        "5;ext=1\r\nabcde\r\n1\r\nf\r\n0\r\nX-Sum: 7\r\n\r\n",
        "GET /four HTTP/1.1\r\nHost: d\r\n\r\nGET /cut",
    )
    .as_bytes();
    let expected = read(&[whole]);
    assert_eq!(expected.messages.len(), 4);
    assert_eq!(expected.messages[2].2, b"abcdef");
    assert_eq!((expected.messages[2].3, expected.rest), (1, 8));
    for at in 0..whole.len() {
        assert_eq!(read(&[&whole[..at], &whole[at..]]), expected, "split at {at}");
    }
    assert_eq!(read(&whole.chunks(1).collect::<Vec<_>>()), expected);
}

#[test]
fn random_bytes_are_handled_with_any_split() {
    let seeds: [&[u8]; 4] = [
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\nA: b\r\n\r\n",
        b"GET http://a/b HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\nGET / HTTP/1.0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 12\r\nHost: [::1]:80\r\n\r\nabcdefghijkl",
        b"\r\nCONNECT a:1 HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n",
    ];
    let mut random = fastrand::Rng::with_seed(42);
    for round in 0..20_000 {
        let mut bytes = seeds[round % seeds.len()].to_vec();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(0..bytes.len());
            match random.u8(0..4) {
                0 => bytes[at] = random.u8(..),
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, random.choice(b"\r\n :;\t\x00,5".to_vec()).unwrap()),
                _ => bytes.extend_from_within(at..),
            }
        }
        let expected = read(&[&bytes]);
        let at = random.usize(0..bytes.len());
        assert_eq!(read(&[&bytes[..at], &bytes[at..]]), expected, "{}", bytes.escape_ascii());
    }
}

#[test]
fn written_messages_are_parsed() {
    use crate::buffer::Buffer;
    let head = RequestHead::build(
        "POST",
        "/x",
        "a:1",
        &[("x-one", "1"), ("content-length", "999"), ("connection", "x-one")],
    );
    let mut out = Buffer::default();
    write::request(&mut out, &head, Framing::Chunked, write::Persistence::Keep);
    write::data(&mut out, Framing::Chunked, b"hello");
    let mut trailers = Headers::default();
    trailers.append("x-sum", b"7");
    write::finish(&mut out, Framing::Chunked, Some(&trailers));
    let text = "POST /x HTTP/1.1\r\nhost: a:1\r\nx-one: 1\r\ntransfer-encoding: chunked\r\n\r\n\
                5\r\nhello\r\n0\r\nx-sum: 7\r\n\r\n";
    assert_eq!(String::from_utf8_lossy(out.bytes()), text);
    let meaning = read(&[out.bytes()]);
    assert_eq!(meaning.messages, [("POST a:1 /x".to_owned(), Framing::Chunked, b"hello".to_vec(), 1)]);
}

#[test]
fn names_end_at_the_first_byte_that_is_no_token() {
    for (at, byte) in (0..20).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
        let mut text = *b"Content-TYPE-zZaA_19";
        text[at] = byte;
        let end = text.iter().position(|byte| !parse::is_token(*byte)).unwrap_or(text.len());
        let mut expected = text;
        expected[..end].make_ascii_lowercase();
        assert_eq!((parse::lower_name(&mut text, 0), text), (end, expected), "{byte:#x} at {at}");
    }
}
