//! Validation of bootstrap files: the sidecar and a real Envoy accept the same files.
//!
//! `tests/validate` has one file for each rule. Its name starts with Envoy's verdict.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Mutex,
    thread,
};

/// Files that Envoy accepts and the sidecar refuses, with the reason.
const REFUSED_HERE: [(&str, &str); 2] = [
    ("valid-no-router", "without a router no request can be forwarded or answered"),
    ("valid-ext-authz-no-service", "without a service no request can be authorized"),
];

/// Number of files that are validated at once.
const AT_ONCE: usize = 4;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/validate")
}

fn ours(file: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_skysail-proxy"))
        .args(["--mode", "validate", "-c"])
        .arg(file)
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap()
}

fn theirs(file: &Path) -> Output {
    let options = ["--mode", "validate", "--log-level", "error", "-c"];
    Command::new(skysail_testkit::envoy()).args(options).arg(file).output().unwrap()
}

#[test]
fn verdicts_equal_envoys() {
    let mut files: Vec<_> = folder().read_dir().unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 60, "{}", files.len());
    let (files, wrong) = (Mutex::new(files.into_iter()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(file) = files.lock().unwrap().next() else { return };
                    wrong.lock().unwrap().extend(difference(&file));
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Compares the verdicts about a file with each other and with the file's name.
fn difference(file: &Path) -> Option<String> {
    let name = file.file_stem().unwrap().to_str().unwrap();
    let expected = name.starts_with("valid-");
    let (ours, theirs) = (ours(file), theirs(file));
    let is_exception = REFUSED_HERE.iter().any(|(exception, _)| *exception == name);
    let agree = theirs.status.success() == expected && ours.status.success() == (expected && !is_exception);
    let text = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    (!agree).then(|| format!("{name}:\n{}\n{}", text(&ours), text(&theirs)))
}

#[test]
fn a_refusal_names_the_resource_and_the_field() {
    for (file, words) in [
        ("connect-timeout-zero", "static_resources.clusters[0].connect_timeout: must be at least 1ns"),
        ("empty-stat-prefix", "filters[0].typed_config.stat_prefix: must not be empty"),
        ("unknown-mirror", "names cluster \"two\", which does not exist"),
        ("duplicate-address", "has the address 127.0.0.1:10000 already"),
        ("duplicate-pipe", "has the address /nowhere/socket already"),
        ("dns-caches-differ", "another DNS cache has the name \"c\""),
        ("retry-intervals", "retry_policy.retry_back_off.max_interval: must be at least base_interval"),
    ] {
        let output = ours(&folder().join(format!("invalid-{file}.yaml")));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(words), "{file}: {stderr}");
    }
}
