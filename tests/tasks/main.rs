//! The examples of `examples/tasks`: each does what its README says.
//!
//! Meshes are started by area. Tasks whose objects do not interfere share one mesh: a task's files are added while it
//! runs, as users do, and removed afterwards.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

mod gateways;
mod machines;
mod migration;
mod observability;
mod routing;
mod security;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use skysail_testkit::{Mesh, Setup, eventually};

const BINARY: &str = env!("CARGO_BIN_EXE_skysail");

/// Returns the folder of an example.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tasks").join(name)
}

/// Returns the names and texts of the YAML files of an example.
fn files(name: &str) -> Vec<(String, String)> {
    let entries = fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path());
    let yaml = entries.filter(|path| path.extension().is_some_and(|found| found == "yaml"));
    yaml.map(|path| {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        (format!("{name}-{file}"), fs::read_to_string(path).unwrap())
    })
    .collect()
}

/// Configures a mesh with the application and the files of these tasks.
fn app_with(tasks: &[&str]) -> Setup {
    let setup = Setup::of_folder(BINARY, &folder("app"));
    for task in tasks {
        for (file, text) in files(task) {
            setup.put(&file, &text);
        }
    }
    setup
}

/// Adds the files of a task to a running mesh.
fn apply(mesh: &Mesh, task: &str) {
    for (file, text) in files(task) {
        mesh.put(&file, &text);
    }
}

/// Removes the files of a task.
fn remove(mesh: &Mesh, task: &str) {
    for (file, _) in files(task) {
        fs::remove_file(mesh.config().join(file)).unwrap();
    }
}

/// Waits until a call from `page` gets this status and a body that contains `text`. Returns the body.
fn wait_answer(mesh: &Mesh, url: &str, arguments: &[&str], status: u16, text: &str) -> String {
    eventually(&format!("{url} answers {status} with {text:?}"), || {
        let answer = mesh.call("page", url, arguments);
        match answer.status == Some(status) && answer.body.contains(text) {
            true => Ok(answer.body),
            false => Err(format!("{answer:?}")),
        }
    })
}

/// Sends requests from `page` and returns the number of responses of each pod version.
fn versions(mesh: &Mesh, url: &str, count: usize, arguments: &[&str]) -> BTreeMap<String, usize> {
    let count = count.to_string();
    let output = mesh.run(&[&["call", "page", url, "-n", &count], arguments].concat());
    let mut versions = BTreeMap::new();
    for part in String::from_utf8_lossy(&output.stdout).split(r#""version":""#).skip(1) {
        let version = part.split('"').next().unwrap_or_default();
        *versions.entry(version.to_owned()).or_default() += 1;
    }
    versions
}

/// Waits until all of 20 responses are of this version.
fn wait_only(mesh: &Mesh, url: &str, arguments: &[&str], version: &str) {
    eventually(&format!("only {version} answers {url} {arguments:?}"), || {
        let found = versions(mesh, url, 20, arguments);
        if found == BTreeMap::from([(version.to_owned(), 20)]) { Ok(()) } else { Err(format!("{found:?}")) }
    });
}

/// Checks that one line of a log contains all these texts; the error is the log. `of` are arguments of `skysail logs`.
fn logged(mesh: &Mesh, of: &[&str], texts: &[&str]) -> Result<(), String> {
    let output = mesh.run(&[&["logs"], of].concat());
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_found = log.lines().any(|line| texts.iter().all(|text| line.contains(text)));
    if is_found { Ok(()) } else { Err(log) }
}

/// Fails if the mesh has reported a mistake in the files.
fn assert_quiet(mesh: &Mesh) {
    let output = mesh.output();
    assert!(!output.contains("warning: ") && !output.contains("error: "), "{output}");
}
