//! The reference pages match the programs: `docs/commands.md` holds the help of every subcommand, `docs/metrics.md` a row for
//! every metric that `skysaild` and `skysail-proxy` serve, `docs/fields.md` one for every field of configuration, and
//! `docs/performance.md` ([`performance`]) the figures of result files.
//!
//! `SKYSAIL_WRITE_DOCS=1 cargo test -p skysail --test references` writes the pages. Metrics of `skysaild` carry their meaning
//! (`# HELP`). A metric of `skysail-proxy` keeps the meaning that the page gives; a metric without one fails the test.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panic")]

#[path = "references/performance.rs"]
mod performance;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, ChildStderr, Command, Stdio},
};

use skysail_model::fields::{FieldRow, Support, kinds};
use skysail_testkit::eventually;

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");
/// A sidecar's bootstrap with every part that has metrics: both kinds of listener, an access log to a collector,
/// outlier detection and an overload action.
const BOOTSTRAP: &str = include_str!("references/bootstrap.yaml");
/// The comment after which a page is generated.
const GENERATED: &str = "<!-- generated: SKYSAIL_WRITE_DOCS=1 cargo test -p skysail --test references -->";
/// More labels than this are Istio's standard labels.
const MAX_LABELS: usize = 3;

fn page(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

/// Compares the generated part of a page, or writes it.
fn check(name: &str, generated: &str) {
    let path = page(name);
    let text = fs::read_to_string(&path).unwrap();
    let (head, rest) = text.split_once(GENERATED).unwrap();
    if std::env::var_os("SKYSAIL_WRITE_DOCS").is_some() {
        fs::write(path, format!("{head}{GENERATED}\n{generated}")).unwrap();
        return;
    }
    let differs = rest.trim().lines().zip(generated.trim().lines()).find(|(page, program)| page != program);
    assert!(
        rest.trim() == generated.trim(),
        "docs/{name} is stale; first difference (page, program): {differs:#?}\nrun {GENERATED}"
    );
}

#[test]
fn the_command_reference_holds_the_help_of_every_subcommand() {
    let mut out = String::new();
    describe(&[], &mut out);
    check("commands.md", &out);
}

/// Writes the help of a subcommand and of those below it.
fn describe(words: &[String], out: &mut String) {
    let output = Command::new(SKYSAIL)
        .args(words)
        .arg("--help")
        // The help shows values of variables, and wraps at the terminal's width.
        .env_clear()
        .env("COLUMNS", "100")
        .output()
        .unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let title = [&["skysail".to_owned()], words].concat().join(" ");
    let lines: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
    let _ = write!(out, "\n## `{title}`\n\n```text\n{}\n```\n", lines.join("\n"));
    let listed = lines.iter().skip_while(|line| **line != "Commands:").skip(1);
    for line in listed.take_while(|line| !line.is_empty()) {
        // Continued descriptions are indented further.
        let is_name = line.starts_with("  ") && !line.starts_with("   ");
        let name = line.split_whitespace().next().filter(|name| is_name && *name != "help");
        if let Some(name) = name {
            describe(&[words, &[name.to_owned()]].concat(), out);
        }
    }
}

#[test]
fn the_field_reference_is_the_table_of_fields() {
    let mut out = String::new();
    for kind in kinds() {
        let _ = write!(out, "\n## {}\n\n| field | support | note | tests |\n|---|---|---|---|\n", kind.name);
        for field in &kind.fields {
            out.push_str(&row_of(field));
        }
    }
    check("fields.md", &out);
}

fn row_of(field: &FieldRow) -> String {
    let value = field.value.map_or(String::new(), |value| format!(": {value}"));
    let support = match field.support {
        Support::Supported => "yes".to_owned(),
        Support::Part => "part".to_owned(),
        Support::Deprecated => "deprecated".to_owned(),
        Support::Warned => "warned".to_owned(),
        Support::Refused => "refused".to_owned(),
        Support::Unread => "–".to_owned(),
        Support::As(path) => format!("as `{path}`"),
    };
    let tests: Vec<String> = field.tests.iter().map(|test| format!("`{test}`")).collect();
    format!("| `{}`{value} | {support} | {} | {} |\n", field.path, field.note, tests.join(", "))
}

#[test]
fn the_metrics_reference_has_a_row_for_every_metric() {
    let text = fs::read_to_string(page("metrics.md")).unwrap();
    let known = text.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix("| `")?.strip_suffix(" |")?.split(" | ").collect();
        Some((cells[0].trim_end_matches('`').to_owned(), (*cells.get(3)?).to_owned()))
    });
    let known: BTreeMap<String, String> = known.collect();
    let mut out = String::from("\n## `skysaild`\n\nPort 15014, `/metrics`.\n");
    table(&control_metrics(), &BTreeMap::new(), &mut out);
    out.push_str("\n## `skysail-proxy`\n\nPort 15090, `/stats/prometheus`; also on port 15000.\n");
    table(&proxy_metrics(), &known, &mut out);
    let unexplained: Vec<&str> = out.lines().filter(|line| line.ends_with("|  |")).collect();
    check("metrics.md", &out);
    assert!(unexplained.is_empty(), "write the meaning into docs/metrics.md: {unexplained:#?}");
}

/// Writes the metrics of a page in Prometheus' text format as rows.
fn table(text: &str, known: &BTreeMap<String, String>, out: &mut String) {
    out.push_str("\n| metric | type | labels | meaning |\n|---|---|---|---|\n");
    let mut meanings = known.clone();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            meanings.insert(name.to_owned(), help.to_owned());
        }
    }
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    for (name, kind) in types.collect::<BTreeMap<_, _>>() {
        let labels = labels(text, name);
        let labels = match labels.len() {
            0..=MAX_LABELS => labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", "),
            _ => "Istio's standard labels".to_owned(),
        };
        let meaning = meanings.get(name).map_or("", String::as_str);
        let _ = writeln!(out, "| `{name}` | {kind} | {labels} | {meaning} |");
    }
}

/// The names of a metric's labels. `le` is part of the format.
fn labels<'a>(text: &'a str, name: &str) -> BTreeSet<&'a str> {
    let samples = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let rest = rest.strip_prefix("_bucket").unwrap_or(rest);
        Some(rest.strip_prefix('{')?.rsplit_once('}')?.0)
    });
    let pairs = samples.flat_map(|labels| labels.split("\","));
    pairs.filter_map(|pair| Some(pair.split_once("=\"")?.0)).filter(|label| *label != "le").collect()
}

fn control_metrics() -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(SKYSAIL);
    command
        .args(["control", "--listen", "127.0.0.1", "--tls-port", "0", "--admin-port", "0", "--config"])
        .arg(folder.path())
        .arg("--ca-dir")
        .arg(folder.path().join("ca"));
    let mut program = Program::start(command);
    get(program.admin(), "/metrics")
}

fn proxy_metrics() -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bootstrap.yaml");
    fs::write(&file, BOOTSTRAP).unwrap();
    let mut command = Command::new(SKYSAIL);
    command.args(["proxy", "--concurrency", "1", "--admin-port", "0", "--bootstrap"]).arg(file);
    let mut program = Program::start(command);
    let admin = program.admin();
    eventually("the sidecar is ready", || {
        let answer = ask(admin, "GET /ready HTTP/1.1\r\nhost: localhost\r\n");
        if answer.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(answer) }
    });
    let listeners = get(admin, "/listeners");
    let listener = |name: &str| {
        let address = listeners.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("::"));
        address.unwrap().parse().unwrap()
    };
    // Each series begins with what it counts: a call of gRPC, and a connection of bytes.
    let _ = ask(listener("http"), "POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\n");
    let _ = ask(listener("tcp"), "");
    let mut page = String::new();
    eventually("every series has begun", || {
        page = get(admin, "/stats/prometheus");
        let parts = ["istio_request_messages_total", "istio_tcp_connections_closed_total", "skysail_export_"];
        match parts.iter().find(|part| !page.contains(**part)) {
            Some(part) => Err(format!("{part} is missing in {page}")),
            None => Ok(()),
        }
    });
    page
}

fn get(address: SocketAddr, path: &str) -> String {
    let answer = ask(address, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n"));
    assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
    answer
}

/// Sends a head on a connection of its own, and returns everything until its end.
fn ask(address: SocketAddr, head: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).unwrap();
    let mut answer = Vec::new();
    // A reset also ends it.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// A program and its log; it ends with the test.
struct Program {
    child: Child,
    log: BufReader<ChildStderr>,
}

impl Program {
    fn start(mut command: Command) -> Self {
        command.env("NO_COLOR", "1").env_remove("SKYSAIL_LOG").stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        Self { child, log }
    }

    /// The address of the admin page, with which a line of the log ends.
    fn admin(&mut self) -> SocketAddr {
        loop {
            let mut line = String::new();
            assert!(
                self.log.read_line(&mut line).unwrap() > 0,
                "the program ended before it served admin pages"
            );
            let address = line.rsplit('=').next().and_then(|text| text.trim().parse().ok());
            if let Some(address) = address.filter(|_| line.contains("admin")) {
                return address;
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
