//! The command `skysail-proxy intercept`: the init container that redirects the connections of a pod to its sidecar.
//!
//! Names and defaults of the options are those of Istio's `istio-iptables`, except where their help says otherwise.

use std::{env, fmt, io, net::IpAddr, time::Duration};

use clap::{builder::FalseyValueParser, value_parser};
use nix::{
    libc,
    net::if_::if_nametoindex,
    unistd::{getegid, geteuid},
};
use skysail_core::{
    names::{INBOUND_PORT, OUTBOUND_PORT},
    stdio,
};

use crate::{
    addresses::Addresses,
    error::Error,
    interception::{DELIVERED_FROM_V6, Exceptions, Include, Interception, List},
    netlink::{self, Socket},
    nftables,
    rules::{Family, Interface, Network, Rules, Sender},
    validation,
};

/// Port of the connection with which `--run-validation` checks the redirection.
const PROBE_PORT: u16 = 15002;

/// Variables of Istio's command without an effect here, which a pod may have by `proxyMetadata`.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("ISTIO_META_DNS_CAPTURE", "DNS queries are not captured"),
    ("INVALID_DROP", "packets that belong to no connection are not dropped"),
    ("ISTIO_OUTBOUND_OWNER_GROUPS", "connections of all groups are intercepted"),
    ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "connections of all groups are intercepted"),
    ("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "it is 127.0.0.1/32"),
];

/// Arguments of `intercept`.
#[derive(Clone, Debug, clap::Args)]
pub struct InterceptArgs {
    /// Port of the sidecar to which connections of the pod's programs are redirected.
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = OUTBOUND_PORT,
        value_parser = value_parser!(u16).range(1..))]
    envoy_port: u16,

    /// Port of the sidecar to which connections to the pod are redirected.
    #[arg(short = 'z', long, value_name = "PORT", default_value_t = INBOUND_PORT,
        value_parser = value_parser!(u16).range(1..))]
    inbound_capture_port: u16,

    /// User ids of the sidecar, whose connections are not redirected.
    #[arg(short = 'u', long, value_name = "IDS", default_value = "1337", value_parser = ids)]
    proxy_uid: List<u32>,

    /// Group ids of the sidecar, whose connections are not redirected; those of --proxy-uid by default.
    #[arg(short = 'g', long, value_name = "IDS", value_parser = ids)]
    proxy_gid: Option<List<u32>>,

    /// How connections to the pod are redirected: REDIRECT. TPROXY is not supported.
    #[arg(short = 'm', long, value_name = "MODE", default_value = "REDIRECT", value_parser = mode)]
    istio_inbound_interception_mode: String,

    /// Ports of the pod whose connections are redirected: * for all, or an empty value for none.
    #[arg(short = 'b', long, value_name = "PORTS", default_value = "*")]
    istio_inbound_ports: Include<u16>,

    /// Ports of the pod whose connections are not redirected, also if -b lists them.
    #[arg(short = 'd', long, value_name = "PORTS", default_value = "")]
    istio_local_exclude_ports: List<u16>,

    /// Networks to which connections are redirected: * for all, or an empty value for none.
    #[arg(short = 'i', long, value_name = "RANGES", default_value = "*")]
    istio_service_cidr: Include<Network>,

    /// Networks to which connections are not redirected.
    #[arg(short = 'x', long, value_name = "RANGES", default_value = "")]
    istio_service_exclude_cidr: List<Network>,

    /// Ports to which connections are redirected, also outside of the networks of -i.
    #[arg(short = 'q', long, value_name = "PORTS", default_value = "")]
    istio_outbound_ports: List<u16>,

    /// Ports to which connections are not redirected.
    #[arg(short = 'o', long, value_name = "PORTS", default_value = "")]
    istio_local_outbound_ports_exclude: List<u16>,

    /// Interfaces of virtual machines in the pod. Their connections count as those of the pod's programs; `vm+` stands for
    /// all names that begin with `vm`.
    #[arg(short = 'k', long, value_name = "NAMES", default_value = "")]
    kube_virt_interfaces: List<Interface>,

    /// Interfaces whose connections are not redirected.
    #[arg(short = 'c', long, value_name = "NAMES", default_value = "")]
    istio_exclude_interfaces: List<Interface>,

    /// Redirects IPv6 also if the pod has IPv4 addresses. Without IPv4 addresses, IPv6 is always redirected.
    #[arg(long, env = "ISTIO_DUAL_STACK", value_parser = FalseyValueParser::new())]
    dual_stack: bool,

    /// Prints the rules in the syntax of nft, and installs nothing.
    #[arg(short = 'n', long, conflicts_with_all = ["run_validation", "skip_rule_apply"])]
    dry_run: bool,

    /// Installs no rules: a CNI plugin has done so.
    #[arg(long)]
    skip_rule_apply: bool,

    /// Checks by a connection of this process that rules redirect it, and exits with code 126 if not. The process needs
    /// the user or the group of the sidecar, and no capability.
    #[arg(long)]
    run_validation: bool,

    /// Destination port of the connection of --run-validation.
    #[arg(long, value_name = "PORT", default_value_t = PROBE_PORT)]
    iptables_probe_port: u16,

    /// Time limit of --run-validation in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    probe_timeout: Duration,

    /// Options of Istio's command that are refused by name.
    #[arg(long, hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = no_dns)]
    redirect_dns: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = no_dns)]
    capture_all_dns: Option<String>,
}

/// Redirects the connections of this network namespace, and checks that they are redirected, as the arguments say.
///
/// # Errors
/// The kernel refuses, or connections are not redirected.
pub fn run(args: &InterceptArgs) -> Result<(), Error> {
    for (name, effect) in WITHOUT_EFFECT {
        if env::var(name).is_ok_and(|value| !["", "false"].contains(&value.as_str())) {
            warn(format_args!("the variable {name} has no effect: {effect}"));
        }
    }
    let senders = args.senders();
    let exceptions = args.exceptions();
    let interception = Interception {
        sidecar: &senders,
        outbound_port: args.envoy_port,
        inbound_port: args.inbound_capture_port,
        exceptions: &exceptions,
        before: Vec::new(),
    };
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    if args.run_validation
        && !senders.iter().any(|sender| [Sender::User(user), Sender::Group(group)].contains(sender))
    {
        return Err(Error::NotTheSidecar { user, group });
    }
    let addresses =
        Addresses::read().map_err(|error| Error::System("reading the addresses of the pod", error))?;
    if addresses.v4 && addresses.v6 && !args.dual_stack {
        warn(
            "IPv6 connections of this pod are not intercepted: it also has IPv4 addresses, and --dual-stack \
              (ISTIO_DUAL_STACK=true) is not set",
        );
    }
    let families = addresses.families(args.dual_stack);
    if args.dry_run {
        let tables: Vec<_> = families.iter().map(|family| (*family, interception.rules(*family))).collect();
        return Ok(stdio::print(nftables::text(&by_reference(&tables)).trim_end())?);
    }
    if !args.skip_rule_apply {
        install(families, &interception)?;
        stdio::print(format_args!(
            "connections ({}) are redirected to port {}, inbound ones to port {}",
            names(families),
            interception.outbound_port,
            interception.inbound_port,
        ))?;
    }
    if args.run_validation {
        let checked =
            families.iter().filter(|family| **family == Family::V6 || addresses.v4 || !addresses.v6);
        for family in checked {
            validation::check(
                *family,
                interception.inbound_port,
                args.iptables_probe_port,
                args.probe_timeout,
            )?;
        }
        stdio::print("connections of this pod are intercepted")?;
    }
    Ok(())
}

/// Installs the rules in this thread's network namespace, in place of those of an earlier run.
fn install(families: &'static [Family], interception: &Interception<'_>) -> Result<(), Error> {
    if families.contains(&Family::V6) {
        // The sidecar's connections to its workload are from this address. IPv4 needs none: all of 127.0.0.0/8 is local.
        let what = "assigning ::6 to the interface lo";
        assign(DELIVERED_FROM_V6.into()).map_err(|error| Error::of(what, error))?;
    }
    let tables: Vec<_> = families.iter().map(|family| (*family, interception.rules(*family))).collect();
    let installed =
        Socket::netfilter().and_then(|mut socket| nftables::replace(&mut socket, &by_reference(&tables)));
    installed.map_err(|cause| match cause.raw_os_error() {
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT) => {
            Error::Kernel { families: names(families), cause }
        }
        _ => Error::of("installing packet rules", cause),
    })
}

/// Assigns an address to `lo`, unless an earlier run did so.
fn assign(address: IpAddr) -> io::Result<()> {
    let index = if_nametoindex("lo")?;
    match netlink::assign(&mut Socket::route()?, index, address, 128) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn by_reference(tables: &[(Family, Rules)]) -> Vec<(Family, &Rules)> {
    tables.iter().map(|(family, rules)| (*family, rules)).collect()
}

fn names(families: &[Family]) -> &'static str {
    if families.contains(&Family::V6) { "IPv4 and IPv6" } else { "IPv4" }
}

fn warn(text: impl fmt::Display) {
    stdio::print_error(format_args!("warning: {text}"));
}

impl InterceptArgs {
    fn senders(&self) -> Vec<Sender> {
        let groups = self.proxy_gid.as_ref().unwrap_or(&self.proxy_uid);
        let users = self.proxy_uid.0.iter().map(|user| Sender::User(*user));
        users.chain(groups.0.iter().map(|group| Sender::Group(*group))).collect()
    }

    fn exceptions(&self) -> Exceptions {
        Exceptions {
            include_inbound: self.istio_inbound_ports.clone(),
            exclude_inbound: self.istio_local_exclude_ports.0.clone(),
            include_outbound: self.istio_outbound_ports.0.clone(),
            exclude_outbound: self.istio_local_outbound_ports_exclude.0.clone(),
            include_ranges: self.istio_service_cidr.clone(),
            exclude_ranges: self.istio_service_exclude_cidr.0.clone(),
            virtual_interfaces: self.kube_virt_interfaces.0.clone(),
            exclude_interfaces: self.istio_exclude_interfaces.0.clone(),
        }
    }
}

/// Parses user or group ids. Programs often run as root, so its connections are never exempt.
fn ids(text: &str) -> Result<List<u32>, String> {
    let ids: List<u32> = text.parse()?;
    match ids.0.as_slice() {
        [] => Err("the sidecar needs an id: its connections would be redirected to itself".to_owned()),
        ids if ids.contains(&0) => Err("0 is root, whose connections are always redirected".to_owned()),
        _ => Ok(ids),
    }
}

fn mode(text: &str) -> Result<String, String> {
    match text {
        "REDIRECT" => Ok(text.to_owned()),
        "TPROXY" => {
            Err("TPROXY is not supported: the sidecar has no transparent listeners. Use REDIRECT".to_owned())
        }
        _ => Err("the mode is REDIRECT".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse().map_err(|_| "it is no number of seconds")?;
    Ok(Duration::from_secs(seconds))
}

fn no_dns(text: &str) -> Result<String, String> {
    if text == "false" {
        return Ok(text.to_owned());
    }
    Err("DNS capture is not supported: the sidecar answers no DNS queries. Remove the option".to_owned())
}
