//! The experiments as data: topology, traffic and the names of the figures.

use crate::{
    access_log::AccessLog,
    load::Traffic,
    node::Extra,
    peers::Peer,
    topology::{Shape, Topology},
};

/// A question, and the settings under which it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Experiment {
    /// Both sidecars at 1,000 requests per second over 16 connections.
    Pair,
    /// Both sidecars at 5,000 and 10,000 requests per second.
    Rates,
    /// Both sidecars at 1,000 requests per second over 2 to 64 connections.
    Connections,
    /// Maximum throughput of one worker over HTTP/1.1.
    FlatOut,
    /// Maximum throughput of one worker over HTTP/2.
    Http2,
    /// One worker that relays bytes in one direction.
    Tcp,
    /// A new mutual TLS connection for every request.
    Handshakes,
    /// Twice the maximum throughput of one worker.
    Overload,
    /// Resident memory.
    Memory,
}

impl Experiment {
    pub(crate) const ALL: [Self; 9] = [
        Self::Pair,
        Self::Rates,
        Self::Connections,
        Self::FlatOut,
        Self::Http2,
        Self::Tcp,
        Self::Handshakes,
        Self::Overload,
        Self::Memory,
    ];

    /// Returns the name on the command line and in result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pair => "pair",
            Self::Rates => "rates",
            Self::Connections => "connections",
            Self::FlatOut => "flat-out",
            Self::Http2 => "http2",
            Self::Tcp => "tcp",
            Self::Handshakes => "handshakes",
            Self::Overload => "overload",
            Self::Memory => "memory",
        }
    }

    /// Returns the sentence above the table of an experiment.
    pub(crate) fn title(name: &str) -> &'static str {
        match name {
            "pair" => {
                "Both sidecars, mutual TLS between them, HTTP/1.1, 1 kB each way, requests due at even intervals"
            }
            "rates" => "The same at higher rates",
            "connections" => "The same over more and fewer connections",
            "flat-out" => "One worker on a CPU of its own, HTTP/1.1, 1 kB each way, at maximum throughput",
            "http2" => "The same over HTTP/2 on both sides, 8 connections with 16 streams each",
            "tcp" => "TCP, bytes in one direction over 4 connections, one worker on a CPU of its own",
            "handshakes" => "A new mutual TLS connection for every request, one worker on a CPU of its own",
            "overload" => {
                "One worker, on one CPU with the server, HTTP/1.1, 1 kB each way: twice its maximum throughput, then half of it"
            }
            "memory" => "Resident memory of the server's sidecar, two workers",
            _ => "",
        }
    }
}

/// Work of one turn, which measures a setting with one peer once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TurnWork {
    /// A load, with a rate or at maximum throughput.
    Load { traffic: Traffic, connections: usize, rate: Option<u32> },
    /// Half of the maximum throughput, then twice, then half, over at most this number of connections.
    Surge { connections: usize },
    /// Memory measurements with these numbers of connections held, in this order.
    Hold(&'static [usize]),
}

/// A row of the plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Setting {
    pub(crate) experiment: Experiment,
    /// Name within the experiment.
    pub(crate) name: &'static str,
    pub(crate) topology: Topology,
    pub(crate) work: TurnWork,
    /// Clusters in the configuration of the sidecar.
    pub(crate) clusters: u16,
    /// The setting is also measured without sidecars, and latency is shown relative to that.
    pub(crate) baseline: bool,
}

/// Bytes of the body of a request, and of its response.
pub(crate) const PAYLOAD: usize = 1_024;

/// All settings, in the order of a round.
pub(crate) const SETTINGS: [Setting; 16] = [
    at_rate(Experiment::Pair, "1,000 rps, 16 connections", 1_000, 16),
    at_rate(Experiment::Rates, "5,000 rps, 32 connections", 5_000, 32),
    at_rate(Experiment::Rates, "10,000 rps, 32 connections", 10_000, 32),
    at_rate(Experiment::Connections, "1,000 rps, 2 connections", 1_000, 2),
    at_rate(Experiment::Connections, "1,000 rps, 4 connections", 1_000, 4),
    at_rate(Experiment::Connections, "1,000 rps, 32 connections", 1_000, 32),
    at_rate(Experiment::Connections, "1,000 rps, 64 connections", 1_000, 64),
    flat_out(Experiment::FlatOut, "plain", Topology::ServerSidecar, Traffic::Http1, 32),
    flat_out(Experiment::FlatOut, "mutual TLS in", Topology::ServerMtls, Traffic::Http1, 32),
    flat_out(Experiment::Http2, "plain", Topology::ServerSidecar, Traffic::Http2 { streams: 16 }, 8),
    flat_out(Experiment::Tcp, "plain", Topology::ServerSidecar, Traffic::Bytes, 4),
    flat_out(
        Experiment::Handshakes,
        "full",
        Topology::ServerMtls,
        Traffic::NewConnections { resume: false },
        16,
    ),
    flat_out(
        Experiment::Handshakes,
        "resumption offered",
        Topology::ServerMtls,
        Traffic::NewConnections { resume: true },
        16,
    ),
    Setting {
        experiment: Experiment::Overload,
        name: "twice the maximum throughput",
        topology: Topology::ServerSidecar,
        work: TurnWork::Surge { connections: 8_192 },
        clusters: 1,
        baseline: false,
    },
    hold("one cluster", &[1_000, 10_000], 1),
    hold("1,000 clusters", &[], 1_000),
];

const fn at_rate(experiment: Experiment, name: &'static str, rate: u32, connections: usize) -> Setting {
    let work = TurnWork::Load { traffic: Traffic::Http1, connections, rate: Some(rate) };
    Setting { experiment, name, topology: Topology::BothSidecars, work, clusters: 1, baseline: true }
}

const fn flat_out(
    experiment: Experiment,
    name: &'static str,
    topology: Topology,
    traffic: Traffic,
    connections: usize,
) -> Setting {
    let work = TurnWork::Load { traffic, connections, rate: None };
    Setting { experiment, name, topology, work, clusters: 1, baseline: false }
}

const fn hold(name: &'static str, connections: &'static [usize], clusters: u16) -> Setting {
    Setting {
        experiment: Experiment::Memory,
        name,
        topology: Topology::ServerSidecar,
        work: TurnWork::Hold(connections),
        clusters,
        baseline: false,
    }
}

impl Setting {
    /// Returns the topology between client and server.
    pub(crate) fn shape(&self) -> Shape {
        let (traffic, connections, pinned) = match self.work {
            TurnWork::Load { traffic, connections, rate } => (traffic, connections, rate.is_none()),
            TurnWork::Surge { connections } => (Traffic::Http1, connections, true),
            TurnWork::Hold(connections) => {
                (Traffic::Http1, connections.iter().copied().max().unwrap_or_default(), false)
            }
        };
        Shape {
            topology: self.topology,
            protocol: traffic.protocol(),
            workers: if pinned { 1 } else { 2 },
            pinned,
            // The client must be able to send more requests than the sidecar can answer.
            client_alone: self.experiment == Experiment::Overload,
            resumption: traffic == Traffic::NewConnections { resume: true },
            clusters: self.clusters,
            extra: Extra::None,
            access_log: AccessLog::None,
            connections,
        }
    }

    /// Returns why this peer cannot take part; `None` if it can.
    pub(crate) fn unable(&self, peer: Peer) -> Option<&'static str> {
        if peer == Peer::Relay && self.experiment == Experiment::Memory {
            return Some("the relay holds no configuration");
        }
        if peer == Peer::Relay && self.experiment == Experiment::Overload {
            return Some("the relay does not parse requests");
        }
        peer.unable(self.shape().protocol, self.topology == Topology::ServerMtls)
    }

    /// Returns the number of connections and the rate of a setting; `None` without a rate.
    pub(crate) fn latency_point(experiment: &str, name: &str) -> Option<(usize, u32)> {
        let setting = SETTINGS.iter().find(|s| s.experiment.name() == experiment && s.name == name)?;
        match setting.work {
            TurnWork::Load { connections, rate: Some(rate), .. } => Some((connections, rate)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_names_are_unique_within_an_experiment() {
        for experiment in Experiment::ALL {
            let names: Vec<_> =
                SETTINGS.iter().filter(|s| s.experiment == experiment).map(|s| s.name).collect();
            assert!(!names.is_empty() && !Experiment::title(experiment.name()).is_empty(), "{experiment:?}");
            let mut unique = names.clone();
            unique.dedup();
            assert_eq!(names, unique);
        }
    }

    #[test]
    fn unsupported_turns_are_known_beforehand() {
        let unable = |experiment, peer| {
            let settings = SETTINGS.iter().filter(move |s| s.experiment == experiment);
            settings.filter_map(|s| s.unable(peer)).count()
        };
        assert_eq!(unable(Experiment::Http2, Peer::Nginx), 1);
        assert_eq!(
            (unable(Experiment::FlatOut, Peer::Relay), unable(Experiment::Handshakes, Peer::Relay)),
            (1, 2)
        );
        assert!(Experiment::ALL.iter().all(|experiment| unable(*experiment, Peer::Envoy) == 0));
    }
}
