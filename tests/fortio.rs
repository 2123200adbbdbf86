//! `skysail load` beside Fortio 1.66: each sends to the server of the other, and each reads the results of the other.
//!
//! Fortio, and a reader with its types, are `tests/fortio/main.go`, built here with `go`.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
};

use serde_json::Value;
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
    command.args(["-redirect-port", "disabled", "-udp-port", "disabled", "-logger-json=false"]);
    let mut process = Process(command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut found = [const { None }; 3];
    let (errors, output) = (process.0.stderr.take().unwrap(), process.0.stdout.take().unwrap());
    let (sender, lines) = std::sync::mpsc::channel();
    for reader in [Box::new(errors) as Box<dyn std::io::Read + Send>, Box::new(output)] {
        let sender = sender.clone();
        // The output must always be read.
        std::thread::spawn(move || {
            BufReader::new(reader).lines().map_while(Result::ok).for_each(|line| _ = sender.send(line));
        });
    }
    while found.iter().any(Option::is_none) {
        let line = lines.recv().unwrap();
        // "Fortio 1.66.0 grpc 'ping' server listening on tcp 127.0.0.1:1234", and the same for tcp-echo and http-echo.
        let Some((name, address)) = line.split_once(" server listening on tcp ") else { continue };
        let address =
            address.split_whitespace().next().unwrap().trim_end_matches(|c: char| !c.is_ascii_digit());
        let index = ["http-echo", "grpc", "tcp-echo"].iter().position(|known| name.contains(known));
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

    let read = |file: &Path| {
        let output = fortio().arg("read").arg(file).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let (first, second) = (read(&ours), read(&theirs));
    for field in ["type", "qps", "connections", "url", "count", "percentiles"] {
        assert_eq!(first[field], second[field], "{field}: {first} {second}");
    }
    assert_eq!((first["count"].as_u64(), first["buckets"].as_u64()), (Some(400), Some(400)));
    assert_eq!(first["codes"], result["RetCodes"]);
    assert_eq!(first["labels"], "ours");
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
