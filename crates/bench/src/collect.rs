//! The collector of a sidecar's access log, a process of its own: reads lines from standard input as a container
//! runtime does, or receives OpenTelemetry log records over gRPC. It writes one line for each entry to a file.

use std::{
    cell::RefCell,
    fs::File,
    io::{self, BufWriter, Write as _},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    rc::Rc,
};

use anyhow::Context as _;
use bytes::{Bytes, BytesMut};
use h2::{Reason, RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use prost::Message as _;
use skysail_proto::otlp::{EXPORT_LOGS, ExportLogsServiceRequest, any_value};
use tokio::task::LocalSet;

use crate::stage;

/// Arguments of the collector.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CollectArgs {
    /// File for the entries.
    #[arg(long, value_name = "FILE")]
    output: PathBuf,

    /// Address and port on which to receive OpenTelemetry logs. Without it, lines are read from standard input.
    #[arg(long, value_name = "IP:PORT")]
    otlp: Option<SocketAddr>,
}

/// Size of a read in bytes.
const READ: usize = 64 << 10;
/// Maximum size of an unfinished line, and of a message, in bytes.
const MAX: usize = 4 << 20;
/// Size of the prefix of a gRPC message in bytes.
const PREFIX: usize = 5;

type EntryFile = Rc<RefCell<BufWriter<File>>>;

/// Collects until standard input ends, or the process is ended.
pub(crate) fn run(args: &CollectArgs) -> anyhow::Result<()> {
    let output = File::options().append(true).create(true).open(&args.output);
    let output = BufWriter::new(output.with_context(|| format!("cannot write {}", args.output.display()))?);
    match args.otlp {
        None => read_lines(&mut io::stdin().lock(), output).context("cannot collect lines"),
        Some(address) => {
            let listener =
                TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
            receive(listener, output)
        }
    }
}

/// Copies lines, each with the prefix of a container runtime's log (CRI): time, stream, and `F` for a full line.
fn read_lines(from: &mut impl io::Read, mut output: BufWriter<File>) -> io::Result<()> {
    let mut waiting = Vec::new();
    let mut buffer = vec![0; READ];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        waiting.extend_from_slice(&buffer[..count]);
        let mut done = 0;
        for end in memchr::memchr_iter(b'\n', &waiting) {
            write!(output, "{} stdout F ", time())?;
            output.write_all(&waiting[done..=end])?;
            done = end + 1;
        }
        waiting.drain(..done);
        if waiting.len() > MAX {
            return Err(io::Error::other(format!("a line has more than {MAX} bytes")));
        }
        output.flush()?;
    }
}

/// Returns the current time with nanoseconds, as RFC 3339 has it.
fn time() -> String {
    let now = time::OffsetDateTime::now_utc();
    stage::rfc3339(now, &format!(".{:09}", now.nanosecond()))
}

/// Receives log records on all connections of the listener.
fn receive(listener: TcpListener, output: BufWriter<File>) -> anyhow::Result<()> {
    listener.set_nonblocking(true)?;
    let output = Rc::new(RefCell::new(output));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            let (stream, _) = listener.accept().await?;
            // An error ends the connection, which the sidecar notices.
            tokio::task::spawn_local(serve(stream, Rc::clone(&output)));
        }
    })
}

async fn serve(stream: tokio::net::TcpStream, output: EntryFile) -> Result<(), h2::Error> {
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(request) = connection.accept().await {
        let (request, answer) = request?;
        tokio::task::spawn_local(answer_call(request, answer, Rc::clone(&output)));
    }
    Ok(())
}

async fn answer_call(
    request: Request<RecvStream>,
    mut answer: SendResponse<Bytes>,
    output: EntryFile,
) -> Result<(), h2::Error> {
    let (head, mut stream) = request.into_parts();
    let mut message = BytesMut::new();
    while let Some(data) = stream.data().await {
        let data = data?;
        stream.flow_control().release_capacity(data.len())?;
        message.extend_from_slice(&data);
        if message.len() > MAX {
            answer.send_reset(Reason::ENHANCE_YOUR_CALM);
            return Ok(());
        }
    }
    let status = match head.uri.path() {
        EXPORT_LOGS if store(&message, &output).is_ok() => "0",
        // INVALID_ARGUMENT and UNIMPLEMENTED.
        EXPORT_LOGS => "3",
        _ => "12",
    };
    let head = Response::builder().header("content-type", "application/grpc").body(());
    let Ok(head) = head else { return Ok(()) };
    let mut stream = answer.send_response(head, false)?;
    // An ExportLogsServiceResponse without fields: everything was accepted.
    stream.send_data(Bytes::from_static(&[0; PREFIX]), false)?;
    stream.send_trailers(HeaderMap::from_iter([(
        HeaderName::from_static("grpc-status"),
        HeaderValue::from_static(status),
    )]))
}

/// Writes the text of each record of a message.
fn store(message: &[u8], output: &EntryFile) -> anyhow::Result<()> {
    let message = message.get(PREFIX..).context("the message has no prefix")?;
    let request = ExportLogsServiceRequest::decode(message)?;
    let mut output = output.borrow_mut();
    let scopes = request.resource_logs.iter().flat_map(|resource| &resource.scope_logs);
    for record in scopes.flat_map(|scope| &scope.log_records) {
        let text = match record.body.as_ref().and_then(|body| body.value.as_ref()) {
            Some(any_value::Value::StringValue(text)) => text.trim_end(),
            _ => "",
        };
        writeln!(output, "{text}")?;
    }
    Ok(output.flush()?)
}

#[cfg(test)]
mod tests {
    use skysail_proto::otlp::{AnyValue, LogRecord, ResourceLogs, ScopeLogs};

    use super::*;

    fn output(folder: &tempfile::TempDir) -> (PathBuf, BufWriter<File>) {
        let path = folder.path().join("x.log");
        let file = File::create(&path).unwrap();
        (path, BufWriter::new(file))
    }

    /// Returns at most 3 bytes a read.
    struct Slow<'a>(&'a [u8]);

    impl io::Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let size = buffer.len().min(3);
            io::Read::read(&mut self.0, &mut buffer[..size])
        }
    }

    #[test]
    fn lines_get_the_time_and_the_stream() {
        let folder = tempfile::tempdir().unwrap();
        let (path, to) = output(&folder);
        read_lines(&mut Slow(b"first line\n\nlast\nunfinished"), to).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<(&str, &str)> = text.lines().map(|line| line.split_once(' ').unwrap()).collect();
        let [(time, first), (_, empty), (_, last)] = lines.as_slice() else { panic!("{text}") };
        assert_eq!((*first, *empty, *last), ("stdout F first line", "stdout F ", "stdout F last"));
        assert_eq!(
            (time.len(), time.ends_with('Z')),
            ("2026-11-28T02:03:04.123456789Z".len(), true),
            "{time}"
        );
    }

    #[test]
    fn each_record_becomes_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let (path, to) = output(&folder);
        let to = Rc::new(RefCell::new(to));
        let record = |text: &str| {
            let value = Some(any_value::Value::StringValue(text.to_owned()));
            LogRecord { body: Some(AnyValue { value }), ..LogRecord::default() }
        };
        let scope = ScopeLogs {
            log_records: vec![record("a\n"), LogRecord::default(), record("b")],
            ..ScopeLogs::default()
        };
        let resource = ResourceLogs { scope_logs: vec![scope], ..ResourceLogs::default() };
        let request = ExportLogsServiceRequest { resource_logs: vec![resource] };
        store(&[&[0; PREFIX][..], &request.encode_to_vec()].concat(), &to).unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "a\n\nb\n");
        for broken in [&b""[..], b"\0\0\0\0\x01\xff"] {
            assert!(store(broken, &to).is_err());
        }
    }
}
