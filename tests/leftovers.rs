//! When a mesh ends in any way, nothing of it remains: no process, no network link, no mount.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    collections::BTreeSet,
    fs,
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use skysail_testkit::{Mesh, Setup, eventually};

fn shop(name: &str) -> Setup {
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"));
    setup.with(&["--name", name])
}

#[test]
fn nothing_is_left_after_ctrl_c() {
    let links = links();
    let mesh = shop("interrupted").ready();
    let (namespaces, folder) = (namespaces(&mesh), mesh.run_folder());
    let ended = mesh.interrupt();
    assert!(ended.status.success() && ended.stdout.contains("healthy"), "{ended:?}");
    all_gone(&namespaces);
    assert_eq!(self::links(), links);
    assert!(!folder.join("interrupted").exists());
}

#[test]
fn nothing_is_left_after_a_crash() {
    let links = links();
    let mut mesh = shop("crashed").ready();
    let namespaces = namespaces(&mesh);
    mesh.signal(Signal::SIGKILL);
    mesh.ended();
    all_gone(&namespaces);
    assert_eq!(self::links(), links);
    // Its folder stays for an analysis, and does not prevent another start.
    let status = mesh.run(&["status"]);
    assert!(String::from_utf8_lossy(&status.stderr).contains("no mesh is running"), "{status:?}");
    let mesh = mesh.again();
    mesh.wait_ready();
    assert!(mesh.interrupt().status.success());
}

/// A state that is visible from outside, and a check for it.
type Moment<'a> = (&'a str, &'a dyn Fn(&Mesh) -> bool);

/// The inner process handles signals some time after its start; the kernel discards earlier ones.
#[test]
fn a_signal_ends_a_mesh_at_each_step_of_its_start() {
    let folder = |mesh: &Mesh| mesh.run_folder().join("early");
    let child = |mesh: &Mesh| {
        let outer = mesh.process();
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap_or_default();
        children.split_whitespace().next().map(str::to_owned)
    };
    let moments: [Moment<'_>; 7] = [
        ("its start", &|_| true),
        ("it has a folder", &|mesh| folder(mesh).exists()),
        ("it has an inner process", &|mesh| child(mesh).is_some()),
        ("the inner process is this program", &|mesh| {
            let command =
                child(mesh).and_then(|child| fs::read_to_string(format!("/proc/{child}/cmdline")).ok());
            command.is_some_and(|command| command.contains("up-inside"))
        }),
        ("it prints its name", &|mesh| mesh.output().contains("mesh early from")),
        ("it has a state", &|mesh| folder(mesh).join("state.json").exists()),
        ("a workload is ready", &|mesh| mesh.output().contains("ready      ")),
    ];
    let signals: Vec<_> =
        [Signal::SIGINT, Signal::SIGTERM].into_iter().filter(|signal| !is_ignored(*signal)).collect();
    for ((moment, is_reached), signal) in
        moments.iter().flat_map(|moment| signals.iter().map(move |signal| (moment, *signal)))
    {
        let mut mesh = shop("early").start();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_reached(&mesh) {
            assert!(Instant::now() < deadline, "{moment}: {}", mesh.output());
            std::thread::yield_now();
        }
        mesh.signal(signal);
        let ended = mesh.ended();
        let before = ended.status.signal() == Some(signal as i32);
        let after = matches!(ended.status.code(), Some(0 | 1));
        assert!(before || after, "{moment}: {ended:?}");
        // Logs of an unhealthy mesh stay, and nothing else.
        let named = ended.stderr.contains("logs are kept in");
        assert_eq!(folder(&mesh).exists(), named, "{moment}: {ended:?}");
    }
}

/// Returns whether this process ignores the signal, as a shell's background jobs ignore SIGINT. Programs
/// inherit this, and the kernel discards the signal until they install a handler.
fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << (signal as u32 - 1)) != 0
}

/// An orphan becomes a child of the mesh's first process, which must reap it.
#[test]
fn orphans_are_reaped() {
    let mesh = shop("orphans").ready();
    let inside = |script: &str| mesh.run(&["exec", "front", "--", "sh", "-c", script]);
    let started = inside("sleep 1000 >/dev/null 2>&1 & echo $!");
    let orphan = String::from_utf8(started.stdout).unwrap().trim().to_owned();
    assert!(inside(&format!("kill -KILL {orphan}")).status.success());
    eventually("nothing is left of the orphan", || {
        // A process that is not reaped can still be sent signals.
        if inside(&format!("kill -0 {orphan} 2>/dev/null")).status.success() {
            Err(format!("process {orphan} is there"))
        } else {
            Ok(())
        }
    });
    // The mesh still sees the end of its own processes.
    let front = || {
        let status = mesh.status();
        status["pods"].as_array().unwrap().iter().find(|pod| pod["workload"] == "front").unwrap().clone()
    };
    assert!(inside(&format!("kill -KILL {}", front()["programs"][0]["process"])).status.success());
    eventually("the program is started again and ready", || match front() {
        pod if pod["restarts"] == 1 && pod["ready"] == true => Ok(()),
        pod => Err(pod.to_string()),
    });
    assert!(mesh.interrupt().status.success());
}

/// Returns the PID and network namespaces of all processes that the mesh started.
fn namespaces(mesh: &Mesh) -> BTreeSet<PathBuf> {
    let own = BTreeSet::from(["pid", "net"].map(|kind| of("self", kind).unwrap()));
    let mut found = BTreeSet::new();
    let mut parents = BTreeSet::from([mesh.process().to_string()]);
    // Parents usually have lower ids than children, but not always.
    loop {
        let known = parents.len();
        for process in processes() {
            if parent(&process).is_some_and(|parent| parents.contains(&parent)) {
                found.extend(["pid", "net"].iter().filter_map(|kind| of(&process, kind)));
                parents.insert(process);
            }
        }
        if parents.len() == known {
            break;
        }
    }
    found.retain(|namespace| !own.contains(namespace));
    // The mesh's own two, and a network namespace for each of three pods.
    assert!(found.len() >= 5, "{found:?}");
    found
}

fn all_gone(namespaces: &BTreeSet<PathBuf>) {
    eventually("every process of the mesh has ended", || {
        let left = processes().filter(|process| {
            ["pid", "net"].iter().any(|kind| of(process, kind).is_some_and(|it| namespaces.contains(&it)))
        });
        let left: Vec<String> = left.collect();
        if left.is_empty() { Ok(()) } else { Err(format!("processes {left:?} are left")) }
    });
}

fn processes() -> impl Iterator<Item = String> {
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

fn of(process: &str, kind: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{process}/ns/{kind}")).ok()
}

fn parent(process: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().to_owned())
}

/// Returns this machine's network links.
fn links() -> BTreeSet<String> {
    let entries = fs::read_dir("/sys/class/net").unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
