//! Times of the HTTP codecs for one message, by the number of header fields. `skysail bench micro` compares them with a
//! baseline.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panic")]

#[path = "../../../benchmarks/micro.rs"]
mod settings;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use skysail_http::{
    buffer::Buffer,
    head::{RequestHead, ResponseHead},
    http1::{
        BodyDecoder, Framing, HeadLimits, Scan, parse,
        write::{self, Persistence},
    },
    http2::{Bounds, Http2Options, Role, Session, SessionLimits},
};

/// Numbers of header fields: a call between services, and a browser with cookies and tracing.
const FIELDS: [usize; 2] = [10, 40];
const LIMITS: HeadLimits = HeadLimits { max_head: 60 << 10, max_headers: 100, keep_case: false };
/// Length of a body in bytes, and of its chunks.
const BODY: usize = 64 << 10;
const CHUNK: usize = 4 << 10;

fn main() {
    let mut criterion = settings::criterion();
    parse_heads(&mut criterion);
    write_heads(&mut criterion);
    decode_chunks(&mut criterion);
    exchange(&mut criterion);
    criterion.final_summary();
}

/// Finds the end of a head in the input, and parses it into the memory of the head before.
fn parse_heads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("http/parse_request");
    for count in FIELDS {
        let text = request(count);
        group.throughput(Throughput::Bytes(text.len() as u64));
        let mut head = RequestHead::default();
        group.bench_with_input(BenchmarkId::from_parameter(count), text.as_bytes(), |bencher, text| {
            bencher.iter(|| {
                let end = Scan::default().end(black_box(text), &LIMITS).unwrap().unwrap();
                parse::request(&text[..end], &LIMITS, &mut head).unwrap()
            });
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("http/parse_response");
    for count in FIELDS {
        let text = format!("HTTP/1.1 200 OK\r\ncontent-length: 512\r\n{}\r\n", lines(count - 1));
        group.throughput(Throughput::Bytes(text.len() as u64));
        let mut head = ResponseHead::default();
        group.bench_with_input(BenchmarkId::from_parameter(count), text.as_bytes(), |bencher, text| {
            bencher.iter(|| {
                let end = Scan::default().end(black_box(text), &LIMITS).unwrap().unwrap();
                parse::response(&text[..end], &LIMITS, "GET", &mut head).unwrap()
            });
        });
    }
}

fn write_heads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("http/write_request");
    for count in FIELDS {
        let mut head = RequestHead::default();
        let (framing, _) = parse::request(request(count).as_bytes(), &LIMITS, &mut head).unwrap();
        let mut out = Buffer::default();
        group.bench_with_input(BenchmarkId::from_parameter(count), &head, |bencher, head| {
            bencher.iter(|| {
                write::request(&mut out, black_box(head), framing, Persistence::Keep);
                let length = out.len();
                out.consume(length);
                length
            });
        });
    }
}

/// Decodes a body in the chunked coding, without a copy of its content.
fn decode_chunks(criterion: &mut Criterion) {
    let chunk = [format!("{CHUNK:x}\r\n").as_bytes(), &[b'x'; CHUNK], b"\r\n"].concat();
    let body = [chunk.repeat(BODY / CHUNK), b"0\r\n\r\n".to_vec()].concat();
    let mut group = criterion.benchmark_group("http/decode_chunks");
    group.bench_with_input(BenchmarkId::from_parameter(BODY / CHUNK), &body, |bencher, body| {
        bencher.iter(|| {
            let (mut decoder, mut rest) = (BodyDecoder::new(Framing::Chunked), black_box(&**body));
            let mut content = 0;
            while !decoder.is_done() {
                let piece = decoder.next(rest, &LIMITS).unwrap();
                rest = &rest[piece.skip + piece.data..];
                content += piece.data;
            }
            assert_eq!(content, BODY);
        });
    });
}

/// A request and its response on an HTTP/2 connection in use: HPACK decodes one head and encodes the other, and nearly
/// all fields are in its tables.
fn exchange(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("http/http2_exchange");
    for count in FIELDS {
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            let options = Http2Options::new(100);
            let limits = SessionLimits { head: Bounds { size: LIMITS.max_head, fields: 100 }, options };
            let mut session = Session::new(Role::Server, limits);
            let mut input = Buffer::default();
            input.extend(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
            input.extend(&frame(SETTINGS, 0, 0, &[]));
            session.feed(&mut input).unwrap();
            let response = response(count);
            let first = block(count, true);
            let mut stream = 1;
            serve(&mut session, &mut input, &frame(HEADERS, END, stream, &first), &response);
            let mut request = frame(HEADERS, END, stream, &block(count, false));
            bencher.iter(|| {
                stream += 2;
                request[5..9].copy_from_slice(&stream.to_be_bytes());
                serve(&mut session, &mut input, &request, &response);
            });
        });
    }
}

/// Feeds a request to the session, and responds.
fn serve(session: &mut Session, input: &mut Buffer, request: &[u8], response: &ResponseHead) {
    input.extend(black_box(request));
    session.feed(input).unwrap();
    let request = session.accept().unwrap();
    assert!(session.respond(request.stream, response, false, true));
    session.forget(request.stream);
    request.head.recycle();
    let length = session.out.len();
    session.out.consume(length);
    session.written();
}

/// Types of frames, and flags: end of the stream and of the head (RFC 9113, section 6.2).
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const END: u8 = 5;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns the header block of a request. The first one adds its fields to the table; later ones refer to them, except
/// for the path and the request's id (RFC 7541, section 6).
fn block(count: usize, is_first: bool) -> Vec<u8> {
    // `:method: GET` and `:scheme: http` are entries 2 and 6 of the static table, `:authority` and `:path` 1 and 4.
    let mut block = vec![0x82, 0x86];
    let text = |block: &mut Vec<u8>, text: &str| {
        // A length of 127 or more would need further bytes.
        block.push(u8::try_from(text.len()).ok().filter(|length| *length < 127).unwrap());
        block.extend_from_slice(text.as_bytes());
    };
    let kept: Vec<_> = fields(count).collect();
    // The newest entry of the dynamic table is 62; `:authority` is the oldest one.
    let entry = |age: usize| 0x80 | u8::try_from(62 + age).unwrap();
    if is_first {
        block.push(0x41);
        text(&mut block, AUTHORITY);
    } else {
        block.push(entry(kept.len()));
    }
    block.push(0x04);
    text(&mut block, PATH);
    for (position, (name, value)) in kept.iter().enumerate() {
        if is_first {
            block.push(0x40);
            text(&mut block, name);
            text(&mut block, value);
        } else {
            block.push(entry(kept.len() - 1 - position));
        }
    }
    block.push(0x00);
    text(&mut block, "x-request-id");
    text(&mut block, "6c1b2f0e-8a41-4f57-9d3c-2f4f0f6b7a11");
    block
}

const AUTHORITY: &str = "reviews.default.svc.cluster.local:9080";
const PATH: &str = "/api/v1/products/42/reviews?limit=20";

/// Returns a request head of HTTP/1.1 with this number of fields.
fn request(count: usize) -> String {
    format!("GET {PATH} HTTP/1.1\r\nHost: {AUTHORITY}\r\n{}\r\n", lines(count - 1))
}

fn lines(count: usize) -> String {
    fields(count).map(|(name, value)| format!("{name}: {value}\r\n")).collect()
}

fn response(count: usize) -> ResponseHead {
    let fields: Vec<_> = fields(count).collect();
    let fields: Vec<_> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    ResponseHead::build(200, &fields)
}

/// Returns header fields: usual ones, then those of an application.
fn fields(count: usize) -> impl Iterator<Item = (String, String)> {
    const USUAL: [(&str, &str); 6] = [
        ("user-agent", "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101"),
        ("accept", "text/html,application/json;q=0.9,*/*;q=0.8"),
        ("accept-encoding", "gzip, deflate, br"),
        ("x-forwarded-proto", "https"),
        ("x-b3-traceid", "80f198ee56343ba864fe8b2a57d3eff7"),
        ("x-b3-spanid", "e457b5a2e4d86bd1"),
    ];
    let own = |number: usize| (format!("x-application-{number}"), format!("value-of-field-{number}"));
    let usual = USUAL.map(|(name, value)| (name.to_owned(), value.to_owned()));
    usual.into_iter().chain((0..).map(own)).take(count)
}
