//! The command `intercept` in network namespaces, with real connections. The tests need root.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panic")]

mod support;

use clap::Parser as _;
use nix::libc;
use skysail_intercept::{
    Error, InterceptArgs,
    netlink::{Message, Socket},
    run,
};
use support::{LINK, Namespace, Owner, World};

const ROOT: Owner = (0, 0);
/// A program of the pod, and what may be the sidecar: by its user, by its group.
const PROGRAM: Owner = (1000, 1000);
const USER: Owner = (1337, 1000);
const GROUP: Owner = (1000, 1337);

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    args: InterceptArgs,
}

/// Runs the command in the pod's network namespace, as this user.
fn intercept(pod: &Namespace, owner: Owner, options: &[&str]) -> Result<(), Error> {
    let args =
        Cli::try_parse_from(["intercept"].iter().chain(options)).unwrap_or_else(|error| panic!("{error}"));
    pod.run_as(owner, || run(&args.args))
}

fn world(pod: &[&str], outside: &[&str]) -> World {
    let mut world = World::create(pod, outside);
    world.listen("outbound", false, 15001);
    world.listen("inbound", false, 15006);
    world.listen("program", false, 8080);
    world.listen("status", false, 15020);
    world.listen("outside", true, 80);
    world.listen("outside, 443", true, 443);
    world
}

/// A pod with both families. Both have a network that some tests exclude: 10.8.0.0/16 and fd08::/16.
fn dual_stack() -> World {
    world(&["10.9.0.1", "fd09::1"], &["10.9.0.2", "10.8.0.2", "fd09::2", "fd08::2"])
}

#[test]
fn connections_are_redirected_except_those_of_the_sidecar() {
    let world = dual_stack();
    let pod = &world.pod;
    // Twice: the second run replaces the rules of the first.
    for _ in 0..2 {
        intercept(pod, ROOT, &["--dual-stack", "-u", "1337", "-d", "15090,15021,15020"]).unwrap();
        for (own, other, loopback, delivered) in
            [("10.9.0.1", "10.9.0.2", "127.0.0.1", "127.0.0.6"), ("[fd09::1]", "[fd09::2]", "[::1]", "::6")]
        {
            let to = |address: &str, port: u16| format!("{address}:{port}");
            for (from, owner, to, reached) in [
                (pod, PROGRAM, to(other, 80), "outbound"),
                (pod, ROOT, to(other, 80), "outbound"),
                // Nothing listens there: the sidecar gets the connection nevertheless.
                (pod, PROGRAM, to(other, 81), "outbound"),
                (pod, USER, to(other, 80), "outside"),
                (pod, GROUP, to(other, 80), "outside"),
                (&world.outside, PROGRAM, to(own, 8080), "inbound"),
                // The owner counts only in the pod.
                (&world.outside, USER, to(own, 8080), "inbound"),
                (&world.outside, PROGRAM, to(own, 15020), "status"),
                (pod, PROGRAM, to(loopback, 8080), "program"),
                (pod, PROGRAM, to(own, 8080), "program"),
                (pod, USER, to(loopback, 8080), "program"),
                // The sidecar calls its own pod through a Service.
                (pod, USER, to(own, 8080), "inbound"),
                (pod, GROUP, to(own, 8080), "inbound"),
            ] {
                assert_eq!(world.connect(from, owner, &to), reached, "{owner:?} {to}");
            }
            // The sidecar delivers an inbound connection.
            let reached = world.connect_from(pod, USER, Some(delivered), &to(own, 8080));
            assert_eq!(reached, "program", "{delivered}");
        }
    }
}

#[test]
fn excluded_connections_are_not_redirected() {
    let world = dual_stack();
    let pod = &world.pod;
    let options = ["--dual-stack", "-o", "443", "-x", "10.8.0.0/16,fd08::/16", "-b", "8080"];
    intercept(pod, ROOT, &options).unwrap();
    for (from, to, reached) in [
        (pod, "10.9.0.2:443", "outside, 443"),
        (pod, "10.8.0.2:80", "outside"),
        (pod, "10.9.0.2:80", "outbound"),
        (pod, "[fd09::2]:443", "outside, 443"),
        (pod, "[fd08::2]:80", "outside"),
        (pod, "[fd09::2]:80", "outbound"),
        (&world.outside, "10.9.0.1:8080", "inbound"),
        (&world.outside, "10.9.0.1:15020", "status"),
        (&world.outside, "[fd09::1]:8080", "inbound"),
        (&world.outside, "[fd09::1]:15020", "status"),
    ] {
        assert_eq!(world.connect(from, PROGRAM, to), reached, "{to}");
    }
    // Only what is included; the rules of the first run are gone.
    let options = ["--dual-stack", "-i", "10.8.0.0/16,fd08::/16", "-q", "443", "-b", ""];
    intercept(pod, ROOT, &options).unwrap();
    for (from, to, reached) in [
        (pod, "10.9.0.2:443", "outbound"),
        (pod, "10.8.0.2:80", "outbound"),
        (pod, "10.9.0.2:80", "outside"),
        (pod, "[fd08::2]:80", "outbound"),
        (pod, "[fd09::2]:80", "outside"),
        (&world.outside, "10.9.0.1:8080", "program"),
        (&world.outside, "[fd09::1]:8080", "program"),
    ] {
        assert_eq!(world.connect(from, PROGRAM, to), reached, "{to}");
    }
}

#[test]
fn interfaces_are_excluded_or_those_of_virtual_machines() {
    let world = dual_stack();
    let pod = &world.pod;
    let reached = |options: &[&str]| {
        intercept(pod, ROOT, options).unwrap();
        [(pod, "10.9.0.2:80"), (&world.outside, "10.9.0.1:8080")]
            .map(|(from, to)| world.connect(from, PROGRAM, to))
    };
    assert_eq!(reached(&["-c", LINK]), ["outside", "program"]);
    assert_eq!(reached(&["-c", "eth+"]), ["outside", "program"]);
    assert_eq!(reached(&["-c", "eth"]), ["outbound", "inbound"]);
    // What arrives by the interface of a virtual machine is outbound.
    assert_eq!(reached(&["-k", LINK]), ["outbound", "outbound"]);
    assert_eq!(reached(&["-k", LINK, "-i", "10.8.0.0/16"]), ["outside", "program"]);
}

#[test]
fn ipv6_is_intercepted_as_the_addresses_of_the_pod_say() {
    let both = dual_stack();
    intercept(&both.pod, ROOT, &[]).unwrap();
    assert_eq!(both.connect(&both.pod, PROGRAM, "10.9.0.2:80"), "outbound");
    assert_eq!(both.connect(&both.pod, PROGRAM, "[fd09::2]:80"), "outside");
    let v6 = world(&["fd09::1"], &["fd09::2"]);
    intercept(&v6.pod, ROOT, &[]).unwrap();
    assert_eq!(v6.connect(&v6.pod, PROGRAM, "[fd09::2]:80"), "outbound");
    assert_eq!(v6.connect(&v6.outside, PROGRAM, "[fd09::1]:8080"), "inbound");
}

#[test]
fn validation_fails_without_rules_and_succeeds_with_them() {
    for (pod, outside) in [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")] {
        // Without listeners: the pod has no other containers yet.
        let world = World::create(&[pod], &[outside]);
        let pod = &world.pod;
        let validate = |owner, limit| {
            intercept(pod, owner, &["--skip-rule-apply", "--run-validation", "--probe-timeout", limit])
        };
        let error = validate(USER, "0").unwrap_err();
        assert_eq!(error.exit_code(), 126, "{error}");
        assert!(error.to_string().contains("are not intercepted"), "{error}");
        let error = validate(PROGRAM, "0").unwrap_err();
        assert_eq!(error.exit_code(), 1, "{error}");
        assert!(error.to_string().contains("user 1000 and group 1000"), "{error}");
        // Rules that a plugin installs meanwhile are noticed.
        std::thread::scope(|scope| {
            let validating = scope.spawn(|| validate(USER, "60"));
            intercept(pod, ROOT, &[]).unwrap();
            validating.join().unwrap().unwrap();
        });
        validate(GROUP, "30s").unwrap();
        // The port of the sidecar is taken.
        let mut world = world;
        world.listen("inbound", false, 15006);
        let pod = &world.pod;
        let options = ["--skip-rule-apply", "--run-validation", "--probe-timeout", "0"];
        assert_eq!(intercept(pod, USER, &options).unwrap_err().exit_code(), 126);
    }
}

#[test]
fn without_the_capability_the_error_names_it() {
    for pod in ["10.9.0.1", "fd09::1"] {
        let world = World::create(&[pod], &[]);
        let error = intercept(&world.pod, PROGRAM, &[]).unwrap_err();
        assert!(error.to_string().contains("NET_ADMIN"), "{error}");
        assert_eq!(error.exit_code(), 1);
        // Nothing is installed, so nothing is needed.
        intercept(&world.pod, PROGRAM, &["--dry-run"]).unwrap();
        intercept(&world.pod, PROGRAM, &["--skip-rule-apply"]).unwrap();
    }
}

#[test]
fn tables_of_other_programs_stay() {
    let world = World::create(&["10.9.0.1"], &["10.9.0.2"]);
    world.pod.run(|| table(libc::NFT_MSG_NEWTABLE, libc::NLM_F_CREATE).unwrap());
    intercept(&world.pod, ROOT, &[]).unwrap();
    let delete = || world.pod.run(|| table(libc::NFT_MSG_DELTABLE, 0));
    delete().unwrap();
    assert_eq!(delete().unwrap_err().raw_os_error(), Some(libc::ENOENT));
}

/// Creates or deletes a table of another program.
fn table(kind: i32, flags: i32) -> std::io::Result<()> {
    let subsystem = libc::NFNL_SUBSYS_NFTABLES as u8;
    let bracket = |kind: i32| Message::unanswered(kind as u16).raw(&[0, 0, 0, subsystem]);
    let message = Message::new(u16::from(subsystem) << 8 | kind as u16, flags)
        .raw(&[libc::NFPROTO_IPV4 as u8, 0, 0, 0])
        .text(1, "other");
    let batch = vec![bracket(libc::NFNL_MSG_BATCH_BEGIN), message, bracket(libc::NFNL_MSG_BATCH_END)];
    Socket::netfilter()?.request(batch)
}
