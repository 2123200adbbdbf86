//! Load generator of the tests: sequential requests over keep-alive connections, counted by their responses. It shows
//! whether requests are lost during configuration changes, and whether weights are met.
//!
//! It repeatedly writes a line of JSON with all counts to standard output; the last one is the result. It does not
//! retry: a request without a complete response counts as failed.

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
use skysail_sandbox::http::{Connection, Event};
use tokio::{
    task::LocalSet,
    time::{Instant, MissedTickBehavior, interval, timeout},
};

use crate::exit;

/// Arguments of `skysail workload load`.
#[derive(Debug, clap::Args)]
pub(crate) struct LoadArgs {
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
struct LoadReport {
    answered: u64,
    failed: u64,
    slowest_ms: f64,
    errors: BTreeMap<String, u64>,
    status: BTreeMap<u16, u64>,
    values: BTreeMap<String, Seen>,
}

/// Responses with one value of the counted header. The times are the starts of the first and the last request, in µs
/// since 1970.
#[derive(Debug, Default, Serialize)]
struct Seen {
    count: u64,
    first: u128,
    last: u128,
}

struct Sender {
    address: String,
    request: String,
    /// Name of the counted header in lower case.
    count: String,
    pause: Option<Duration>,
    left: Cell<u64>,
    report: RefCell<LoadReport>,
}

/// A response without its body.
struct Response {
    status: u16,
    /// Value of the counted header.
    value: Option<String>,
}

const REPORT_INTERVAL: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(20);
/// Pause after a failure, so that refused connections do not become a busy loop.
const PAUSE: Duration = Duration::from_millis(20);

/// Sends the requests from the network namespace of this process.
pub(crate) fn run(args: &LoadArgs) -> anyhow::Result<u8> {
    let rest = args.url.strip_prefix("http://").with_context(|| format!("{}: not http://…", args.url))?;
    let (host, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    let headers: String = args.headers.iter().map(|line| format!("{line}\r\n")).collect();
    let sender = Rc::new(Sender {
        address: if host.contains(':') { host.to_owned() } else { format!("{host}:80") },
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
            // An error means the end of standard input as well.
            let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
            sender.left.set(0);
        });
    }
    let reporter = Rc::clone(&sender);
    let reporting = async move {
        let mut tick = interval(REPORT_INTERVAL);
        loop {
            tick.tick().await;
            reporter.report_counts()?;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            () = all => anyhow::Ok(()),
            ended = reporting => ended,
        }
    })?;
    sender.report_counts()?;
    Ok(exit::of(sender.report.borrow().failed == 0))
}

impl Sender {
    async fn connection(self: Rc<Self>) {
        let mut tick = interval(self.pause.unwrap_or(Duration::from_nanos(1)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut connection = None;
        while self.left.get() > 0 {
            self.left.set(self.left.get() - 1);
            if self.pause.is_some() {
                tick.tick().await;
            }
            let (began, clock) = (SystemTime::now(), Instant::now());
            let outcome = timeout(TIMEOUT, self.request_once(connection.take())).await;
            match outcome.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok((response, open)) => {
                    connection = open.is_open().then_some(open);
                    self.count(&response, began, clock.elapsed());
                }
                Err(error) => {
                    self.fail(&error);
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn request_once(&self, connection: Option<Connection>) -> io::Result<(Response, Connection)> {
        let mut connection = match connection {
            Some(connection) => connection,
            None => Connection::connect(&self.address).await?,
        };
        let mut value = None;
        let mut on = |event: Event<'_>| {
            if let Event::Head(head) = event {
                value = header(head, &self.count);
            }
            Ok(())
        };
        let status = connection.send(&self.request, &mut on).await?;
        Ok((Response { status, value }, connection))
    }

    fn count(&self, response: &Response, began: SystemTime, took: Duration) {
        let mut report = self.report.borrow_mut();
        report.answered += 1;
        report.slowest_ms = report.slowest_ms.max(took.as_secs_f64() * 1000.0);
        *report.status.entry(response.status).or_default() += 1;
        if let Some(value) = &response.value {
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

    fn report_counts(&self) -> anyhow::Result<()> {
        Ok(stdio::print(serde_json::to_string(&*self.report.borrow())?)?)
    }
}

/// Returns the value of a header in a head.
fn header(head: &[u8], name: &str) -> Option<String> {
    let text = String::from_utf8_lossy(head);
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned())
}
