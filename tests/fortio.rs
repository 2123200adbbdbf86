//! `skysail load` beside Fortio 1.66: each sends to the server of the other, and each reads the results of the other.
//!
//! Fortio, and a reader with its types, are `tests/fortio/main.go`, built here with `go`.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
};

use serde_json::{Value, json};
use skysail_testkit::go_program;

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn fortio() -> Command {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    Command::new(BUILT.get_or_init(|| go_program(Path::new(env!("CARGO_MANIFEST_DIR")), "fortio", temporary)))
}

fn skysail() -> Command {
    Command::new(env!("CARGO_BIN_EXE_skysail"))
}

/// Starts our servers. Returns the addresses of HTTP, gRPC and TCP.
fn our_server() -> (Process, [String; 3]) {
    let ports = ["-http-port", "0", "-grpc-port", "0", "-tcp-port", "0"];
    let mut command = skysail();
    command.args(["load", "server", "-listen", "127.0.0.1"]).args(ports).stdout(Stdio::piped());
    let mut process = Process(command.spawn().unwrap());
    let line = BufReader::new(process.0.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let addresses: Vec<_> =
        line.split(", ").map(|part| part.rsplit(' ').next().unwrap().to_owned()).collect();
    (process, addresses.try_into().unwrap())
}

/// Starts Fortio's servers. Returns the same addresses.
fn fortio_server() -> (Process, [String; 3]) {
    let ports = ["-http-port", "-grpc-port", "-tcp-port"].map(|name| [name, "127.0.0.1:0"]);
    let mut command = fortio();
    command.arg("server").args(ports.as_flattened());
    command.args(["-redirect-port", "disabled", "-udp-port", "disabled"]);
    fortio_serving(command, ["http-echo", "grpc", "tcp-echo"])
}

/// Starts servers of Fortio. Returns the addresses of those with these words in their names.
fn fortio_serving<const N: usize>(mut command: Command, names: [&str; N]) -> (Process, [String; N]) {
    command.arg("-logger-json=false");
    let mut process = Process(command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut found = [const { None }; N];
    let (errors, output) = (process.0.stderr.take().unwrap(), process.0.stdout.take().unwrap());
    let (sender, lines) = std::sync::mpsc::channel();
    for reader in [Box::new(errors) as Box<dyn std::io::Read + Send>, Box::new(output)] {
        let sender = sender.clone();
        // The output must always be read.
        std::thread::spawn(move || {
            BufReader::new(reader).lines().map_while(Result::ok).for_each(|line| _ = sender.send(line));
        });
    }
    drop(sender);
    while found.iter().any(Option::is_none) {
        let line = lines.recv().unwrap();
        // "Fortio 1.66.0 grpc 'ping' server listening on tcp 127.0.0.1:1234", and the same for tcp-echo and http-echo.
        let Some((name, address)) = line.split_once(" server listening on tcp ") else { continue };
        let address =
            address.split_whitespace().next().unwrap().trim_end_matches(|c: char| !c.is_ascii_digit());
        let index = names.iter().position(|known| name.contains(known));
        if let Some(index) = index {
            found[index] = Some(address.to_owned());
        }
    }
    (process, found.map(Option::unwrap))
}

/// Runs a load to its end and returns its result.
fn load(mut command: Command, flags: &str, file: &Path) -> Value {
    let (flags, url) = flags.rsplit_once(' ').unwrap();
    command.arg("load").args(flags.split(' ')).arg("-json").arg(file).arg(url);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn each_sends_to_the_server_of_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let (_ours, ours) = our_server();
    let (_theirs, theirs) = fortio_server();
    for [http, grpc, tcp] in [ours, theirs] {
        for (flags, code) in [
            (format!("-qps 0 -c 2 -n 100 http://{http}/?size=100"), "200"),
            (format!("-qps 500 -c 2 -n 100 -payload-size 5000 http://{http}/echo"), "200"),
            (format!("-qps 0 -c 2 -n 100 -grpc {grpc}"), "SERVING"),
            (format!("-qps 0 -c 2 -n 100 -grpc -ping -payload hello {grpc}"), "SERVING"),
            (format!("-qps 0 -c 2 -n 100 tcp://{tcp}"), "OK"),
        ] {
            for command in [skysail(), fortio()] {
                let name = format!("{command:?} {flags}");
                let result = load(command, &flags, &file);
                assert_eq!(result["RetCodes"][code], 100, "{name}: {}", result["RetCodes"]);
                assert_eq!(result["DurationHistogram"]["Count"], 100, "{name}");
            }
        }
    }
}

/// Reads a result with Fortio's types.
fn read_by_fortio(file: &Path) -> Value {
    let output = fortio().arg("read").arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn each_reads_the_results_of_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours.json"), folder.path().join("theirs.json"));
    let (_server, [http, ..]) = our_server();
    let flags = |labels| {
        format!(
            "-qps 400 -c 4 -n 400 -uniform -labels {labels} -allow-initial-errors http://{http}/?status=503:20"
        )
    };
    let mut command = skysail();
    command.arg("load").args(flags("ours").split(' ')).arg("-json").arg(&ours);
    assert_eq!(command.output().unwrap().status.code(), Some(1), "some requests fail");
    let result: Value = serde_json::from_slice(&std::fs::read(&ours).unwrap()).unwrap();
    load(fortio(), &flags("theirs"), &theirs);

    let (first, second) = (read_by_fortio(&ours), read_by_fortio(&theirs));
    assert_eq!((first["buckets"].as_u64(), second["buckets"].as_u64()), (Some(400), Some(400)));
    let (first, second) = (&first["result"], &second["result"]);
    for field in ["RunType", "RequestedQPS", "RequestedDuration", "NumThreads", "URL", "Uniform", "Exactly"] {
        assert_eq!(first[field], second[field], "{field}: {first} {second}");
    }
    assert_eq!(first["RetCodes"], result["RetCodes"]);
    assert_eq!(first["Labels"], "ours");
    let p50 = result["DurationHistogram"]["Percentiles"][0]["Value"].as_f64().unwrap();
    let bucket = result["DurationHistogram"]["Data"].as_array().unwrap().iter();
    let bucket = bucket.clone().find(|bucket| bucket["Percent"].as_f64() >= Some(50.0)).unwrap();
    let (start, end) = (bucket["Start"].as_f64().unwrap(), bucket["End"].as_f64().unwrap());
    assert!(start <= p50 * 1.01 && p50 * 0.99 <= end, "{start} {p50} {end}");

    let output = skysail().args(["load", "report"]).args([&ours, &theirs]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let Some(row) = text.lines().find(|line| line.contains("| theirs")) else { panic!("{text}") };
    assert!(row.contains("| 400 |") || row.contains("     400 |"), "{text}");
}

/// Fields of every result of Fortio, and those of single types.
const OF_ALL: [&str; 17] = [
    "RunType",
    "Labels",
    "RequestedQPS",
    "RequestedDuration",
    "ActualQPS",
    "ActualDuration",
    "NumThreads",
    "Version",
    "DurationHistogram",
    "ErrorsDurationHistogram",
    "Exactly",
    "Jitter",
    "Uniform",
    "NoCatchUp",
    "RunID",
    "ID",
    "RetCodes",
];
const OF_HTTP: &[&str] =
    &["IPCountMap", "URL", "Sizes", "HeaderSizes", "Sockets", "SocketCount", "ConnectionStats", "AbortOn"];
const OF_GRPC: &[&str] = &["Destination", "Streams", "Ping"];
const OF_TCP: &[&str] = &["Destination", "SocketCount"];

#[test]
fn fortio_reads_and_reports_every_type_of_result() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("theirs.json");
    let results = folder.path().join("results");
    std::fs::create_dir(&results).unwrap();
    let (_server, [http, grpc, tcp]) = our_server();
    let mut report = fortio();
    report
        .args(["report", "-http-port", "127.0.0.1:0", "-redirect-port", "disabled", "-data-dir"])
        .arg(&results);
    let (_report, [page]) = fortio_serving(report, ["report"]);
    for (labels, fields, flags) in [
        ("HTTP", OF_HTTP, format!("http://{http}/?size=100")),
        ("HTTP2", OF_HTTP, format!("-h2 http://{http}/")),
        ("health", OF_GRPC, format!("-grpc {grpc}")),
        ("ping", OF_GRPC, format!("-grpc -ping -payload hello {grpc}")),
        ("TCP", OF_TCP, format!("tcp://{tcp}")),
    ] {
        let flags = format!("-qps 400 -c 2 -n 40 -uniform -labels {labels} {flags}");
        let theirs = load(fortio(), &flags, &file);
        let mut command = skysail();
        command.args(["load", "-a", "-data-dir"]).arg(&results).args(flags.split(' '));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let entries = std::fs::read_dir(&results).unwrap().map(|entry| entry.unwrap().path());
        let saved = entries.filter(|path| path.to_string_lossy().ends_with(&format!("_{labels}.json")));
        let saved: Vec<PathBuf> = saved.collect();
        let [saved] = &saved[..] else { panic!("not one result {labels}: {saved:?}") };
        let text = std::fs::read_to_string(saved).unwrap();
        let ours: Value = serde_json::from_str(&text).unwrap();

        let read = read_by_fortio(saved);
        assert_eq!(read["buckets"], 40, "{flags}");
        assert!(ours["StartTime"].as_str().unwrap().starts_with(&read["year"].to_string()), "{flags}");
        for field in OF_ALL.iter().chain(fields) {
            assert!(ours.get(field).is_some(), "{flags}: {field} is missing");
            let (ours, read) = (&ours[field], &read["result"][field]);
            assert!(is_alike(ours, read), "{flags}: {field}: {ours}, read as {read}");
        }
        for field in ["RunType", "RequestedQPS", "RequestedDuration", "NumThreads", "Exactly", "RetCodes"]
            .iter()
            .chain(
                fields.iter().filter(|field| matches!(**field, "URL" | "Destination" | "Streams" | "Ping")),
            )
        {
            assert_eq!(ours[field], theirs[field], "{flags}: {field}");
        }
        let name = saved.file_name().unwrap().to_str().unwrap();
        assert!(get(&page, "/").contains(&format!("<option value=\"{name}\"")), "{name} is listed");
        assert_eq!(get(&page, &format!("/data/{name}")), text, "{name}");
    }
}

/// Returns whether Fortio has read a value as it is. Numbers may have been rounded, and fields that Fortio does not have
/// are missing.
fn is_alike(written: &Value, read: &Value) -> bool {
    match (written, read) {
        (Value::Number(written), Value::Number(read)) => {
            let (written, read) = (written.as_f64().unwrap(), read.as_f64().unwrap());
            (written - read).abs() <= 1e-12 * written.abs()
        }
        (Value::Array(written), Value::Array(read)) => {
            written.len() == read.len() && written.iter().zip(read).all(|(one, other)| is_alike(one, other))
        }
        (Value::Object(written), Value::Object(read)) => {
            written.iter().all(|(name, one)| is_alike(one, read.get(name).unwrap_or(&Value::Null)))
        }
        (written, read) => written == read,
    }
}

/// Returns the body of a page.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200 "), "{path}: {head}");
    body.to_owned()
}

/// Both programs send at the same rate, in turns, and then as fast as one thread can. `SKYSAIL_REPORT=FILE` runs more and
/// longer rounds, and writes a result: `SKYSAIL_REPORT=load.json cargo test --release -p skysail --test fortio rate`.
#[test]
fn both_send_every_request_of_a_rate() {
    let report = std::env::var_os("SKYSAIL_REPORT").map(PathBuf::from);
    let (rounds, rate, seconds) = if report.is_some() { (5, 1_000, 5) } else { (2, 200, 3) };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let (_server, [http, ..]) = our_server();
    let common = format!("-c 4 -uniform -p 50,90,99 -r 0.00001 -qps {rate}");
    let number = rate * seconds;
    let mut figures = Figures::new();
    for _ in 0..rounds {
        // At the end of a duration, Fortio leaves out requests that are late. So it gets their number.
        let theirs = load(fortio(), &format!("{common} -n {number} http://{http}/"), &file);
        let ours = load(skysail(), &format!("{common} -t {seconds}s http://{http}/"), &file);
        for (program, result, histogram) in [
            ("fortio", &theirs, "DurationHistogram"),
            ("skysail-since-sent", &ours, "SinceSentHistogram"),
            ("skysail-since-due", &ours, "DurationHistogram"),
        ] {
            assert_eq!(result["RetCodes"], json!({"200": number}), "{program}");
            assert_eq!(result["ErrorsDurationHistogram"]["Count"], 0, "{program}");
            // The last request is due one interval of a connection before the end, at the earliest.
            let (took, end) = (result["ActualDuration"].as_u64().unwrap(), seconds * 1_000_000_000);
            assert!(took >= end - 4 * 1_000_000_000 / rate, "{program} exceeds the rate: {took} ns");
            let histogram = &result[histogram];
            assert_eq!(histogram["Count"], number, "{program}");
            let of = |one: &Value| one["Value"].as_f64().unwrap();
            let percentiles: Vec<f64> = histogram["Percentiles"].as_array().unwrap().iter().map(of).collect();
            let (min, max) = (histogram["Min"].as_f64().unwrap(), histogram["Max"].as_f64().unwrap());
            let ordered = [&[min][..], &percentiles, &[max]].concat();
            assert!(percentiles.len() == 3 && ordered.is_sorted(), "{program}: {ordered:?}");
            add(&mut figures, program, "rate", result["ActualQPS"].as_f64().unwrap());
            for (name, time) in
                ["latency_p50_us", "latency_p90_us", "latency_p99_us"].into_iter().zip(percentiles)
            {
                add(&mut figures, program, name, time * 1e6);
            }
        }
        let fastest =
            load(skysail(), &format!("-qps 0 -threads 1 -c 64 -t {seconds}s http://{http}/"), &file);
        let (sent, cpu) = (fastest["ActualQPS"].as_f64().unwrap(), fastest["GeneratorCpu"].as_f64());
        assert!(sent > 0.0 && fastest["ErrorsDurationHistogram"]["Count"] == 0, "{fastest}");
        add(&mut figures, "skysail-one-thread", "rate", sent);
        if let Some(cpu) = cpu {
            add(&mut figures, "skysail-one-thread", "cpu_us", cpu * 1e6);
        }
    }
    if let Some(report) = report {
        let settings = json!({"rounds": rounds, "rate": rate, "seconds": seconds, "connections": 4});
        let result = json!({
            "benchmark": "load",
            "commit": commit(),
            "machine": machine(),
            "settings": settings,
            "summary": summary(figures),
        });
        std::fs::write(report, format!("{result:#}\n")).unwrap();
    }
}

/// Returns the commit of the source tree, and whether files have changes.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").current_dir(env!("CARGO_MANIFEST_DIR")).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let is_clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if is_clean { commit } else { format!("{commit} with changes") })
}

/// Returns a description of the machine, with the names of other results.
fn machine() -> Value {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = text("/proc/cpuinfo");
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    json!({
        "cpu": cpu.map_or("unknown", |(_, name)| name.trim()),
        "cpus": std::thread::available_parallelism().map_or(1, usize::from),
        "kernel": text("/proc/sys/kernel/osrelease").trim(),
    })
}

/// Values of all rounds by program and metric.
type Figures = BTreeMap<&'static str, BTreeMap<&'static str, Vec<f64>>>;

fn add(figures: &mut Figures, program: &'static str, metric: &'static str, value: f64) {
    figures.entry(program).or_default().entry(metric).or_default().push(value);
}

/// Returns a row for each program, as in the results of `skysail bench run`.
fn summary(figures: Figures) -> Value {
    let spread = |(metric, mut values): (&str, Vec<f64>)| {
        values.sort_by(f64::total_cmp);
        let (min, max) = (values.first().copied(), values.last().copied());
        (metric.to_owned(), json!({"median": values.get(values.len() / 2), "min": min, "max": max}))
    };
    let row = |(program, metrics): (&str, BTreeMap<&str, Vec<f64>>)| {
        let metrics: serde_json::Map<String, Value> = metrics.into_iter().map(spread).collect();
        json!({"case": program, "metrics": metrics})
    };
    figures.into_iter().map(row).collect()
}
