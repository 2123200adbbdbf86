//! Load generator of the tests: sequential requests over keep-alive connections, counted by their responses. It shows whether
//! requests are lost while the configuration changes, and whether weights are met.
//!
//! It writes a line of JSON with all counts to standard output repeatedly; the last one is the result. There are no retries: a
//! request without a complete response counts as failed.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    rc::Rc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use serde::Serialize;
use skysail_core::stdio;
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    task::LocalSet,
    time::{Instant, MissedTickBehavior, interval, timeout},
};

use crate::exit;

/// Arguments of `skysail workload load`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// URL, such as `http://flight:9080/healthz`.
    url: String,
    /// Header, `NAME: VALUE`; may be given several times.
    #[arg(short = 'H', long = "header")]
    headers: Vec<String>,
    /// Number of requests [default: until standard input ends].
    #[arg(short = 'n', long)]
    times: Option<u64>,
    /// Number of connections.
    #[arg(short, long, default_value_t = 4)]
    connections: u32,
    /// Maximum of requests per second.
    #[arg(short, long)]
    rate: Option<f64>,
    /// Response header by whose value responses are counted.
    #[arg(long, value_name = "NAME")]
    count: Option<String>,
}

/// Result of a run.
#[derive(Debug, Default, Serialize)]
struct Report {
    answered: u64,
    failed: u64,
    slowest_ms: f64,
    errors: BTreeMap<String, u64>,
    status: BTreeMap<u16, u64>,
    values: BTreeMap<String, Seen>,
}

/// Answers with one value of the counted header; the times are when the requests began, in µs since 1970.
#[derive(Debug, Default, Serialize)]
struct Seen {
    count: u64,
    first: u128,
    last: u128,
}

struct Sender {
    place: String,
    request: String,
    /// The counted header's name in lower case.
    count: String,
    pause: Option<Duration>,
    left: Cell<u64>,
    report: RefCell<Report>,
}

type Stream = BufReader<TcpStream>;

struct Answer {
    status: u16,
    value: Option<String>,
    close: bool,
}

const TELL: Duration = Duration::from_millis(50);
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// Pause after a failure, so that refused connections do not become a busy loop.
const REST: Duration = Duration::from_millis(20);

/// Sends the requests from the network of this process.
pub(crate) fn run(args: &Args) -> anyhow::Result<u8> {
    let rest = args.url.strip_prefix("http://").with_context(|| format!("{}: not http://…", args.url))?;
    let (host, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    let headers: String = args.headers.iter().map(|line| format!("{line}\r\n")).collect();
    let sender = Rc::new(Sender {
        place: if host.contains(':') { host.to_owned() } else { format!("{host}:80") },
        request: format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{headers}\r\n"),
        count: args.count.as_deref().unwrap_or_default().to_ascii_lowercase(),
        pause: args.rate.map(|rate| Duration::from_secs_f64(f64::from(args.connections) / rate)),
        left: Cell::new(args.times.unwrap_or(u64::MAX)),
        report: RefCell::default(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let all = LocalSet::new();
    for _ in 0..args.connections {
        all.spawn_local(Rc::clone(&sender).connection());
    }
    if args.times.is_none() {
        let sender = Rc::clone(&sender);
        all.spawn_local(async move {
            // However it ends, nobody holds it open any more.
            let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
            sender.left.set(0);
        });
    }
    let told = Rc::clone(&sender);
    let telling = async move {
        let mut tick = interval(TELL);
        loop {
            tick.tick().await;
            told.tell()?;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            () = all => anyhow::Ok(()),
            ended = telling => ended,
        }
    })?;
    sender.tell()?;
    Ok(exit::of(sender.report.borrow().failed == 0))
}

impl Sender {
    async fn connection(self: Rc<Self>) {
        let mut tick = interval(self.pause.unwrap_or(Duration::from_nanos(1)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut kept = None;
        while self.left.get() > 0 {
            self.left.set(self.left.get() - 1);
            if self.pause.is_some() {
                tick.tick().await;
            }
            let (began, clock) = (SystemTime::now(), Instant::now());
            let outcome = timeout(ANSWER_WITHIN, self.ask(kept.take())).await;
            match outcome.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok((answer, stream)) => {
                    kept = (!answer.close).then_some(stream);
                    self.count(&answer, began, clock.elapsed());
                }
                Err(error) => {
                    self.fail(&error);
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }

    async fn ask(&self, kept: Option<Stream>) -> io::Result<(Answer, Stream)> {
        let mut stream = match kept {
            Some(stream) => stream,
            None => BufReader::new(TcpStream::connect(&self.place).await?),
        };
        stream.write_all(self.request.as_bytes()).await?;
        let answer = self.read(&mut stream).await?;
        Ok((answer, stream))
    }

    /// One answer, its body dropped (RFC 9112, section 6).
    async fn read(&self, stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Answer> {
        let status = line(stream).await?;
        let code =
            status.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| wrong(&status))?;
        let mut answer = Answer { status: code, value: None, close: false };
        let (mut length, mut chunked) = (None, false);
        loop {
            let field = line(stream).await?;
            if field.is_empty() {
                break;
            }
            let (name, value) = field.split_once(':').ok_or_else(|| wrong(&field))?;
            let (name, value) = (name.to_ascii_lowercase(), value.trim());
            match name.as_str() {
                "content-length" => length = Some(value.parse().map_err(|_| wrong(&field))?),
                "transfer-encoding" => chunked = value.eq_ignore_ascii_case("chunked"),
                "connection" => answer.close = value.eq_ignore_ascii_case("close"),
                _ => {}
            }
            if name == self.count {
                answer.value = Some(value.to_owned());
            }
        }
        match length {
            _ if chunked => while skip_chunk(stream).await? {},
            Some(length) => skip(stream, length).await?,
            None if matches!(code, 204 | 304) => {}
            None => skip_all(stream).await?,
        }
        answer.close |= !chunked && length.is_none();
        Ok(answer)
    }

    fn count(&self, answer: &Answer, began: SystemTime, took: Duration) {
        let mut report = self.report.borrow_mut();
        report.answered += 1;
        report.slowest_ms = report.slowest_ms.max(took.as_secs_f64() * 1000.0);
        *report.status.entry(answer.status).or_default() += 1;
        if let Some(value) = &answer.value {
            let began = began.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
            let seen = report.values.entry(value.clone()).or_default();
            seen.count += 1;
            seen.last = seen.last.max(began);
            seen.first = if seen.count == 1 { began } else { seen.first.min(began) };
        }
    }

    fn fail(&self, error: &io::Error) {
        let mut report = self.report.borrow_mut();
        report.failed += 1;
        *report.errors.entry(error.to_string()).or_default() += 1;
    }

    fn tell(&self) -> anyhow::Result<()> {
        Ok(stdio::print(serde_json::to_string(&*self.report.borrow())?)?)
    }
}

fn wrong(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} is not HTTP"))
}

async fn line(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<String> {
    let mut text = String::new();
    if stream.read_line(&mut text).await? == 0 {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the connection ended before the answer did",
        ));
    }
    text.truncate(text.trim_end().len());
    Ok(text)
}

async fn skip(stream: &mut (impl AsyncBufRead + Unpin), length: u64) -> io::Result<()> {
    let read = tokio::io::copy(&mut stream.take(length), &mut tokio::io::sink()).await?;
    if read < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

async fn skip_all(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<()> {
    tokio::io::copy(stream, &mut tokio::io::sink()).await.map(|_| ())
}

/// Whether another chunk follows.
async fn skip_chunk(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<bool> {
    let head = line(stream).await?;
    let size = u64::from_str_radix(head.split(';').next().unwrap_or_default().trim(), 16);
    let size = size.map_err(|_| wrong(&head))?;
    skip(stream, size).await?;
    while !line(stream).await?.is_empty() && size == 0 {}
    Ok(size > 0)
}
