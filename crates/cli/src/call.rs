//! `skysail call`: an HTTP request or a gRPC call from inside a workload, with curl's options.

mod descriptors;
mod grpc;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::File,
    io::{self, IsTerminal as _, Read as _},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use skysail_core::stdio::{self, PrintError};
use skysail_sandbox::{
    enter::{self, EnterTarget},
    http::{self, Call, Event},
    rundir::{self, State},
};

use crate::{exit, pods};

/// Arguments of `skysail call`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skysail call booking http://flight:9080/healthz -i -H 'x-canary: always'
  skysail call booking http://flight:9080/flight -d @request.json -H 'content-type: application/json'
  skysail call booking http://flight:9080/healthz --count 100 > /dev/null
  skysail call booking flight:9081 --grpc acme.Flights/Count -d '{\"day\": \"mon\"}' -H 'x-user: jason'
  skysail call booking flight:9081 --grpc-list
  skysail call booking flight:9081 --grpc-health

The request goes through the sidecar, as the workload's own requests do. The body of the response is written to \
standard output as it arrives; the status is the last line on standard error. With --count, each request has a line \
there, and the last line is a summary: how many of each status, and the minimum, median and maximum of the latency.

The exit code is 0 if each status is below 400 (with --grpc: OK; with --grpc-health: SERVING), \
and 1 for any other status and if no complete response arrived.")]
pub(crate) struct CallArgs {
    /// Workload (its first ready pod is used) or pod; NAMESPACE/NAME if the name is not unique. `control` is the
    /// network of the control plane.
    workload: String,
    #[command(flatten)]
    request: Request,
    /// Print the status line and the headers of the response before the body.
    #[arg(short, long)]
    include: bool,
    /// Send a HEAD request, and print the status line and the headers of the response.
    #[arg(short = 'I', long, conflicts_with_all = ["method", "data", "data_raw"])]
    head: bool,
    /// Print the connection's address (`*`) and the heads of request (`>`) and response (`<`) on standard error.
    #[arg(short, long)]
    verbose: bool,
    /// Time limit of a request, in seconds.
    #[arg(short, long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    max_time: Duration,
    /// Number of requests, one after the other.
    #[arg(short = 'n', long, visible_alias = "times", value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// Call the health service of the gRPC server at the URL and print the status, such as SERVING. SERVICE is the
    /// service to check [default: the server].
    #[arg(long, value_name = "SERVICE", num_args = 0..=1, require_equals = true, default_missing_value = "",
        conflicts_with_all = ["method", "headers", "data", "data_raw", "http2", "include", "head", "verbose", "count"])]
    grpc_health: Option<String>,
    #[command(flatten)]
    grpc: grpc::GrpcOptions,
    /// Name of the mesh, if several are running.
    #[arg(long)]
    name: Option<String>,
}

/// A request, as given on the command line.
#[derive(Debug, Default, clap::Args)]
struct Request {
    /// URL, such as `http://flight:9080/healthz`; HOST:PORT of a gRPC server.
    url: String,
    /// Method [default: GET, or POST with a body].
    #[arg(short = 'X', long = "request", visible_alias = "method", value_name = "METHOD")]
    method: Option<String>,
    /// Header, `NAME: VALUE`; may be given several times. `NAME:` removes a default header, `NAME;` sends it empty.
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// Body, or with --grpc JSON documents; `@FILE` reads a file as it is, `@-` standard input. Several bodies are
    /// joined by `&`. The default content-type is application/x-www-form-urlencoded.
    #[arg(short, long, visible_alias = "data-binary", value_name = "BODY")]
    data: Vec<String>,
    /// Body in which a leading `@` is literal.
    #[arg(long, value_name = "BODY")]
    data_raw: Vec<String>,
    /// Use HTTP/2 with prior knowledge instead of HTTP/1.1.
    #[arg(long, visible_alias = "http2-prior-knowledge")]
    http2: bool,
}

/// Maximum size of a request body, in bytes.
const MAX_BODY: u64 = 64 << 20;

fn seconds(text: &str) -> Result<Duration, String> {
    let limit = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit
        .filter(|limit| !limit.is_zero())
        .ok_or_else(|| format!("{text:?} is not a number of seconds above 0"))
}

pub(crate) fn run(args: CallArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let target = pods::target(&mesh, &args.workload)?;
    if args.grpc.is_used() {
        return call_grpc(args, &mesh, target);
    }
    // The body is read before the pod is entered, because some files differ there.
    let mut call = args.request.complete()?;
    if args.head {
        "HEAD".clone_into(&mut call.method);
    }
    enter::enter(&mesh, target)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(service) = &args.grpc_health {
        let server = call.url;
        return match runtime.block_on(http::grpc_health(&server, None, service, args.max_time)) {
            Ok(health) => {
                stdio::print(health)?;
                Ok(exit::of(health.is_serving()))
            }
            Err(error) => refused(&server, error),
        };
    }
    let mut shown =
        ExchangePrinter { include: args.include || args.head, verbose: args.verbose, in_line: false };
    let mut summary = Summary::default();
    for _ in 0..args.count {
        let started = Instant::now();
        let exchange =
            http::exchange(&call, args.max_time, |event| shown.show(event).map_err(io::Error::other));
        match runtime.block_on(exchange) {
            Ok(status) => {
                summary.add(status.to_string(), status < 400, started.elapsed());
                shown.print_line(&status.to_string());
            }
            Err(error) => {
                shown.end_line();
                summary.failed += 1;
                refused(&call.url, error)?;
            }
        }
    }
    if args.count > 1 {
        stdio::print_error(summary.line());
    }
    Ok(exit::of(summary.is_good()))
}

/// Lists the methods of a gRPC server, or calls one.
fn call_grpc(args: CallArgs, mesh: &State, target: EnterTarget<'_>) -> anyhow::Result<u8> {
    let Request { url, headers, data, .. } = args.request;
    let pieces = data.iter().map(|text| read(text)).collect::<anyhow::Result<Vec<_>>>()?;
    let session = args.grpc.session(url.clone(), headers, pieces.join(&b'\n'), args.max_time)?;
    enter::enter(mesh, target)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let prepared = match runtime.block_on(session.prepare()) {
        Ok(Some(prepared)) => prepared,
        Ok(None) => return Ok(exit::OK),
        Err(error) => return refused(&url, error),
    };
    let mut shown = ExchangePrinter { include: false, verbose: args.verbose, in_line: false };
    let mut summary = Summary::default();
    for _ in 0..args.count {
        let started = Instant::now();
        match runtime.block_on(prepared.call(&mut shown)) {
            Ok(status) => {
                summary.add(status.name(), status.is_ok(), started.elapsed());
                grpc::print_status(&status);
            }
            Err(error) => {
                summary.failed += 1;
                refused(&url, error)?;
            }
        }
    }
    if args.count > 1 {
        stdio::print_error(summary.line());
    }
    Ok(exit::of(summary.is_good()))
}

/// Prints why there is no response. Fails if the request is invalid, or the reader of the output is gone.
fn refused(url: &str, error: io::Error) -> anyhow::Result<u8> {
    if error.kind() == io::ErrorKind::InvalidInput {
        return Err(error.into());
    }
    let error = match error.downcast::<PrintError>() {
        Ok(closed) => return Err(closed.into()),
        Err(error) => error,
    };
    stdio::print_error(format!("skysail: request to {url}: {error}"));
    Ok(exit::BAD)
}

impl Request {
    /// Reads the body, and adds curl's defaults for a request with a body.
    fn complete(self) -> anyhow::Result<Call> {
        let Self { url, method, mut headers, data, data_raw, http2 } = self;
        let mut body: Option<Vec<u8>> = None;
        let pieces = data.iter().map(|text| read(text));
        for piece in pieces.chain(data_raw.into_iter().map(|text| Ok(text.into_bytes()))) {
            let piece = piece?;
            match &mut body {
                Some(body) => {
                    body.push(b'&');
                    body.extend_from_slice(&piece);
                }
                None => body = Some(piece),
            }
        }
        let typed = headers.iter().any(|line| {
            let name = line.split([':', ';']).next().unwrap_or_default();
            name.trim().eq_ignore_ascii_case("content-type")
        });
        if body.is_some() && !typed {
            headers.push("content-type: application/x-www-form-urlencoded".to_owned());
        }
        let method = method.unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
        Ok(Call { method, url, headers, body: body.map(Into::into), http2 })
    }
}

/// Returns the content of a `-d`.
fn read(data: &str) -> anyhow::Result<Vec<u8>> {
    let Some(file) = data.strip_prefix('@') else { return Ok(data.as_bytes().to_vec()) };
    let mut body = Vec::new();
    if file == "-" {
        io::stdin().take(MAX_BODY + 1).read_to_end(&mut body).context("reading standard input")?;
    } else {
        let open = File::open(file).and_then(|file| file.take(MAX_BODY + 1).read_to_end(&mut body));
        open.with_context(|| format!("-d {data}: reading {file}"))?;
    }
    if body.len() as u64 > MAX_BODY {
        bail!("-d {data}: the body is larger than {} MiB", MAX_BODY >> 20);
    }
    Ok(body)
}

/// Prints the parts of an exchange as they arrive.
struct ExchangePrinter {
    include: bool,
    verbose: bool,
    /// True if the last byte on standard output is not a line break.
    in_line: bool,
}

impl ExchangePrinter {
    fn show(&mut self, event: Event<'_>) -> Result<(), PrintError> {
        match event {
            Event::Connected(to) if self.verbose => {
                stdio::print_error(format!("* Connected to {} port {}", to.ip(), to.port()));
            }
            Event::Request(head) if self.verbose => print_lines('>', head),
            Event::Head(head) | Event::Trailers(head) => {
                if self.verbose {
                    self.end_line();
                    print_lines('<', head);
                }
                if self.include {
                    stdio::write(head)?;
                }
            }
            Event::Body(piece) => {
                stdio::write(piece)?;
                self.in_line = piece.last() != Some(&b'\n');
            }
            Event::Connected(_) | Event::Request(_) => {}
        }
        Ok(())
    }

    /// Prints a line on standard error. It starts a new line if both outputs are the same terminal.
    fn print_line(&mut self, line: &str) {
        self.end_line();
        stdio::print_error(line);
    }

    /// Ends the current line on a terminal. Standard output has the bytes of the body only, which need not end with a
    /// line break.
    fn end_line(&mut self) {
        if std::mem::take(&mut self.in_line) && io::stdout().is_terminal() && io::stderr().is_terminal() {
            stdio::print_error("");
        }
    }
}

/// Prints the lines of a head after a mark. Control characters are escaped, because a terminal interprets them.
fn print_lines(mark: char, head: &[u8]) {
    let mut text = String::new();
    for line in String::from_utf8_lossy(head).split_terminator('\n') {
        let _ = write!(text, "{mark} ");
        for character in line.trim_end_matches('\r').chars() {
            match character {
                '\t' => text.push(character),
                character if character.is_control() => text.extend(character.escape_default()),
                character => text.push(character),
            }
        }
        text.push('\n');
    }
    stdio::print_error(text.trim_end_matches('\n'));
}

/// Outcome of several requests.
#[derive(Debug, Default)]
struct Summary {
    statuses: BTreeMap<String, u32>,
    /// Responses whose status is an error.
    bad: u32,
    /// Requests without a response.
    failed: u32,
    times: Vec<Duration>,
}

impl Summary {
    fn add(&mut self, status: String, is_good: bool, time: Duration) {
        self.bad += u32::from(!is_good);
        *self.statuses.entry(status).or_default() += 1;
        self.times.push(time);
    }

    fn is_good(&self) -> bool {
        self.failed == 0 && self.bad == 0
    }

    /// Returns a line such as `100 requests: 98 x 200, 2 x 503; latency min 0.4 ms, median 0.5 ms, max 9.1 ms`.
    fn line(&mut self) -> String {
        let all = self.times.len() + self.failed as usize;
        let mut counts: Vec<_> =
            self.statuses.iter().map(|(status, count)| format!("{count} x {status}")).collect();
        if self.failed > 0 {
            counts.push(format!("{} without a response", self.failed));
        }
        let mut line = format!("{all} requests: {}", counts.join(", "));
        self.times.sort_unstable();
        if let [min, .., max] | [min @ max] = self.times.as_slice() {
            let median = self.times[(self.times.len() - 1) / 2];
            let [min, median, max] = [min, &median, max].map(|time| time.as_secs_f64() * 1000.0);
            let _ = write!(line, "; latency min {min:.1} ms, median {median:.1} ms, max {max:.1} ms");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_posted_as_a_form_by_default() {
        let request = |method: Option<&str>, headers: &[&str], data: &[&str]| {
            let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
            let (headers, data) = (texts(headers), texts(data));
            let request = Request { method: method.map(str::to_owned), headers, data, ..Request::default() };
            let call = request.complete().unwrap();
            let body = call.body.map(|body| String::from_utf8(body.to_vec()).unwrap());
            (call.method, call.headers.join(", "), body)
        };
        let form = "content-type: application/x-www-form-urlencoded";
        for (given, method, headers, body) in [
            (request(None, &[], &[]), "GET", "", None),
            (request(None, &[], &["a=b"]), "POST", form, Some("a=b")),
            (request(None, &[], &["a=b", "c=d"]), "POST", form, Some("a=b&c=d")),
            (request(Some("PUT"), &[], &[""]), "PUT", form, Some("")),
            (
                request(None, &["Content-Type: text/plain"], &["x"]),
                "POST",
                "Content-Type: text/plain",
                Some("x"),
            ),
            (request(None, &["Content-Type:"], &["x"]), "POST", "Content-Type:", Some("x")),
            (request(Some("DELETE"), &["a: b"], &[]), "DELETE", "a: b", None),
        ] {
            assert_eq!(given, (method.to_owned(), headers.to_owned(), body.map(str::to_owned)));
        }
    }

    #[test]
    fn bodies_are_read_from_files_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("body");
        std::fs::write(&file, b"a\r\n\0\xff").unwrap();
        assert_eq!(read(&format!("@{}", file.display())).unwrap(), b"a\r\n\0\xff");
        let missing = read("@/nowhere/to/be/found").unwrap_err();
        assert!(format!("{missing:#}").contains("/nowhere/to/be/found: No such file"), "{missing:#}");
        let raw = Request { data_raw: vec!["@x".to_owned()], ..Request::default() };
        assert_eq!(&*raw.complete().unwrap().body.unwrap(), b"@x");
    }

    #[test]
    fn several_requests_are_summarized() {
        let mut summary = Summary::default();
        for (status, time) in [(503, 9100), (200, 400), (200, 500), (200, 600)] {
            summary.add(status.to_string(), status < 400, Duration::from_micros(time));
        }
        summary.failed = 1;
        assert!(!summary.is_good());
        assert_eq!(
            summary.line(),
            "5 requests: 3 x 200, 1 x 503, 1 without a response; latency min 0.4 ms, median 0.5 ms, max 9.1 ms"
        );
        let mut failed = Summary { failed: 2, ..Summary::default() };
        assert_eq!(failed.line(), "2 requests: 2 without a response");
    }

    #[test]
    fn limits_are_numbers_of_seconds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "x", "NaN", "inf"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
