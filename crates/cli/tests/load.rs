//! `skysail load` as a program: progress on a terminal, and the end by Ctrl-C.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, ExitStatus, Stdio},
};

use nix::{
    pty::{Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn skysail(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skysail"));
    command.arg("load").args(args).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Starts the echo servers. Returns the addresses of HTTP, gRPC and TCP.
fn server() -> (Process, [String; 3]) {
    let ports = ["-http-port", "0", "-grpc-port", "0", "-tcp-port", "0"];
    let args = [&["server", "-listen", "127.0.0.1"][..], &ports].concat();
    let mut process = Process(skysail(&args).spawn().unwrap());
    let line = BufReader::new(process.0.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let addresses: Vec<_> =
        line.split(", ").map(|part| part.rsplit(' ').next().unwrap().to_owned()).collect();
    (process, addresses.try_into().unwrap())
}

/// What a load did that was ended by Ctrl-C.
struct Interrupted {
    status: ExitStatus,
    output: String,
    /// The line of progress after which it was ended.
    progress: String,
}

/// Runs a load on a terminal. Ends it when its progress shows requests.
fn interrupted(args: &[&str]) -> Interrupted {
    let size = Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(&size, None).unwrap();
    // The command holds the terminal's other end until it is dropped.
    let mut process = Process(skysail(args).stderr(pty.slave).spawn().unwrap());
    let mut shown = BufReader::new(File::from(pty.master));
    let progress = loop {
        let mut line = String::new();
        // Without a program on the terminal, the read fails.
        shown.read_line(&mut line).unwrap();
        if requests_per_second(&line) > 0 {
            break line;
        }
    };
    kill(Pid::from_raw(process.0.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    let mut output = String::new();
    process.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    Interrupted { status: process.0.wait().unwrap(), output, progress }
}

/// Returns the rate in a line of progress, such as `1 of 600 s: 1,000/s, P50 89.2 µs, P99 286 µs, 0 failed`.
fn requests_per_second(line: &str) -> u64 {
    let (_, rest) = line.split_once(" s: ").unwrap_or_else(|| panic!("no progress: {line:?}"));
    let (rate, rest) = rest.split_once("/s, P50 ").unwrap_or_else(|| panic!("no progress: {line:?}"));
    assert!(rest.contains(", P99 ") && rest.trim_end().ends_with(" 0 failed"), "{line:?}");
    rate.replace(',', "").parse().unwrap()
}

#[test]
fn ctrl_c_ends_a_load_with_the_requests_so_far() {
    let (_server, [http, grpc, tcp]) = server();
    // In the closed loop no request is due that is not sent, so each load succeeds.
    for (flags, url, code) in [
        (&["-c", "2"][..], format!("http://{http}/?delay=5ms"), "200"),
        (&["-c", "2", "-h2", "-s", "2"], format!("http://{http}/?delay=5ms"), "200"),
        (&["-c", "1"], format!("grpc://{grpc}"), "SERVING"),
        (&["-c", "1"], format!("tcp://{tcp}"), "OK"),
    ] {
        let all = 1_000_000_000_u64;
        let count = all.to_string();
        let args = [&["-qps", "0", "-n", &count, "-json", "-"][..], flags, &[url.as_str()]].concat();
        let Interrupted { status, output, progress } = interrupted(&args);
        assert_eq!(status.code(), Some(0), "{url}: {output}");
        assert!(!progress.contains(" of "), "a load without a duration: {progress}");
        let result: Value = serde_json::from_str(&output).unwrap();
        assert_eq!((&result["Interrupted"], &result["Exactly"]), (&true.into(), &all.into()), "{url}");
        let sent = result["DurationHistogram"]["Count"].as_u64().unwrap();
        assert!(sent > 0 && sent < all, "{url}: {sent}");
        assert_eq!(result["RetCodes"], serde_json::json!({ code: sent }), "{url}");
        let buckets = result["DurationHistogram"]["Data"].as_array().unwrap();
        assert_eq!(buckets.iter().map(|one| one["Count"].as_u64().unwrap()).sum::<u64>(), sent, "{url}");
    }
}

#[test]
fn ctrl_c_ends_a_load_at_a_rate_and_shows_that_it_ended_early() {
    let (_server, [http, ..]) = server();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let (rate, seconds) = (100_u64, 600_u64);
    let (duration, url) = (format!("{seconds}s"), format!("http://{http}/"));
    let args = ["-qps", &rate.to_string(), "-t", &duration, "-c", "2", "-json", file.to_str().unwrap(), &url];
    let Interrupted { status, output, progress } = interrupted(&args);
    assert!(progress.contains(&format!(" of {seconds} s: ")), "{progress}");
    let warning = output.lines().find(|line| line.starts_with("warning") && line.contains("ended early"));
    assert!(warning.is_some() && output.contains("responses    200: "), "{output}");
    let result: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let (sent, unsent) = (&result["DurationHistogram"]["Count"], &result["Unsent"]);
    assert!(sent.as_u64() > Some(0) && sent.as_u64() < Some(rate * seconds), "{result}");
    assert!(result["ActualDuration"].as_u64() < Some(seconds * 1_000_000_000), "{result}");
    assert_eq!(result["RetCodes"]["200"], *sent);
    // On a busy machine, a request may have been due and not sent.
    assert_eq!(status.code(), Some(i32::from(unsent != 0)), "{result}");
}
