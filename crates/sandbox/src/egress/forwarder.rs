//! The forwarder: a process in the host's network namespace that makes connections for the mesh. It needs no
//! privileges.

use std::{
    ffi::OsString,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{net::UnixStream as Channel, process::CommandExt as _},
    },
    process::{Child, Command, Stdio},
    sync::Arc,
};

use nix::sys::{
    prctl,
    signal::Signal,
    socket::{getsockopt, sockopt},
};
use skysail_core::descriptors;
use skysail_intercept::netlink::Socket;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpStream, UnixStream},
    sync::{Semaphore, mpsc},
    task::spawn_blocking,
    time::timeout,
};

use super::{CACHE_TIME, ForwarderMessage, LookupResult, closed};
use crate::{
    descriptor,
    error::{Context as _, Error},
    forward::{self, Failure},
    links,
};

/// Maximum number of concurrent connections; further ones wait in the kernel. It is lower if the process may have few
/// open files.
const MAX_CONNECTIONS: usize = 1024;
/// Open files that are reserved for other uses than the two of each connection.
const OTHER_FILES: u64 = 128;
/// Maximum number of concurrent lookups, each on a thread of its own.
const MAX_LOOKUPS: usize = 16;
/// Maximum number of addresses of a name.
const MAX_ADDRESSES: usize = 16;
/// Maximum number of failures that wait to be sent.
const MAX_PENDING: usize = 256;

/// Handle of a running forwarder; dropping it ends the process.
pub(crate) struct Forwarder {
    child: Child,
    /// The mesh's end of the socket.
    pub(crate) channel: Option<Channel>,
}

impl Forwarder {
    /// Starts this program again in the network namespace of this process. The arguments must lead to [`run`].
    pub(crate) fn start(arguments: &[OsString]) -> Result<Self, Error> {
        let what = "starting the forwarder of --egress";
        let (channel, theirs) = Channel::pair().context(what)?;
        let program = std::env::current_exe().context(what)?;
        let child = Command::new(program)
            .args(arguments)
            // Disables the host's search domains in lookups: resolver(5).
            .env("LOCALDOMAIN", "")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            // A Ctrl-C on the terminal is for `skysail up`, which needs the forwarder until its pods have ended.
            .process_group(0)
            .spawn()
            .context(what)?;
        Ok(Self { child, channel: Some(channel) })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes connections for a mesh until its socket, the standard input, closes.
///
/// # Errors
/// When the socket cannot be used.
pub fn run() -> Result<(), Error> {
    let what = "forwarding connections out of the mesh";
    prctl::set_pdeathsig(Signal::SIGKILL).context(what)?;
    prctl::set_no_new_privs().context(what)?;
    let channel = Channel::from(io::stdin().as_fd().try_clone_to_owned().context(what)?);
    // A mesh that fails to start sends no listener.
    let Ok(listener) = descriptor::receive(&channel) else { return Ok(()) };
    let files = descriptors::raise().saturating_sub(OTHER_FILES) / 2;
    let max = MAX_CONNECTIONS.min(usize::try_from(files).unwrap_or(MAX_CONNECTIONS)).max(1);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_LOOKUPS)
        .build()
        .context(what)?;
    let done = runtime.block_on(serve(channel, listener.into(), max));
    // A lookup may block for long.
    runtime.shutdown_background();
    done.context(what)
}

async fn serve(channel: Channel, listener: TcpListener, max: usize) -> io::Result<()> {
    channel.set_nonblocking(true)?;
    let (read, mut write) = UnixStream::from_std(channel)?.into_split();
    let (failures, mut messages) = mpsc::channel::<ForwarderMessage>(MAX_PENDING);
    let failure_sender = failures.clone();
    let failed = move |from, failure: Failure| {
        // A server may close a connection without an answer. A failure that does not fit is dropped, because other
        // failures are reported.
        if failure != Failure::NoAnswer {
            let _ = failure_sender.try_send(ForwarderMessage::Failed(from, failure.to_string()));
        }
    };
    let writing = async {
        while let Some(message) = messages.recv().await {
            let line = serde_json::to_string(&message)? + "\n";
            write.write_all(line.as_bytes()).await?;
        }
        Ok(())
    };
    let reading = async {
        let permits = Arc::new(Semaphore::new(MAX_LOOKUPS));
        let mut lines = BufReader::new(read).lines();
        while let Some(name) = lines.next_line().await? {
            let (failures, permits) = (failures.clone(), Arc::clone(&permits));
            tokio::spawn(async move {
                let found = timeout(CACHE_TIME, look_up(name.clone(), permits)).await;
                let late = || LookupResult::Failed(format!("no answer within {CACHE_TIME:?}"));
                let _ = failures.send(ForwarderMessage::Result(name, found.unwrap_or_else(|_| late()))).await;
            });
        }
        Ok(())
    };
    tokio::select! {
        ended = forward::serve_each(listener, max, destination, failed) => ended,
        ended = writing => ended,
        ended = reading => ended,
    }
}

/// Returns the original destination of a redirected connection, if it is open to workloads.
fn destination(client: &TcpStream) -> Result<Vec<SocketAddr>, Failure> {
    let to = getsockopt(client, sockopt::OriginalDst).map_err(|error| {
        Failure::Refused(format!("cannot read the original destination of a connection: {error}"))
    })?;
    let address = Ipv4Addr::from_bits(u32::from_be(to.sin_addr.s_addr));
    let to = SocketAddr::from((address, u16::from_be(to.sin_port)));
    let refused = |reason: &str| Err(Failure::Refused(format!("{to}: {reason} is closed to workloads")));
    if let Some(reason) = closed(address) {
        return refused(reason);
    }
    match Socket::route().and_then(|mut socket| links::is_beyond(&mut socket, address)) {
        Ok(true) => Ok(vec![to]),
        Ok(false) => refused("an address of this machine itself"),
        Err(error) => Err(Failure::Connect(format!("{to}: {error}"))),
    }
}

/// Looks up a name by the host's resolver, which uses `/etc/hosts` and the host's other sources.
async fn look_up(name: String, permits: Arc<Semaphore>) -> LookupResult {
    let Ok(permit) = permits.acquire_owned().await else { return LookupResult::Missing };
    let found = spawn_blocking(move || {
        // Held until the resolver returns, even after the lookup has timed out.
        let _permit = permit;
        (name.as_str(), 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect())
    });
    match found.await {
        Ok(found) => classify(found),
        Err(error) => LookupResult::Failed(error.to_string()),
    }
}

/// Converts the resolver's answer. The standard library gives getaddrinfo's errors as English texts only: glibc's or
/// musl's.
fn classify(found: io::Result<Vec<IpAddr>>) -> LookupResult {
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let text = error.to_string();
            let is = |texts: [&str; 2]| texts.iter().any(|known| text.contains(known));
            return if is(["Name or service not known", "Name does not resolve"]) {
                LookupResult::Missing
            } else if is(["No address associated with hostname", "Name has no usable address"]) {
                LookupResult::Unusable("it has no address".to_owned())
            } else {
                LookupResult::Failed(text)
            };
        }
    };
    let mut obstacle = "it has no IPv4 address, and pods have no others".to_owned();
    let mut usable = Vec::new();
    for address in found {
        if let IpAddr::V4(address) = address {
            match closed(address) {
                Some(reason) => obstacle = format!("{address}, {reason}, is closed to workloads"),
                None => usable.push(address),
            }
        }
    }
    usable.truncate(MAX_ADDRESSES);
    if usable.is_empty() { LookupResult::Unusable(obstacle) } else { LookupResult::Addresses(usable) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_resolver_are_distinguished() {
        let error =
            |text: &str| Err(io::Error::other(format!("failed to lookup address information: {text}")));
        assert_eq!(classify(error("Name or service not known")), LookupResult::Missing);
        assert_eq!(classify(error("Name does not resolve")), LookupResult::Missing);
        assert!(matches!(classify(error("No address associated with hostname")), LookupResult::Unusable(_)));
        assert!(matches!(classify(error("Temporary failure in name resolution")), LookupResult::Failed(_)));
        let addresses = |texts: &[&str]| Ok(texts.iter().map(|text| text.parse().unwrap()).collect());
        let usable = Ipv4Addr::new(198, 51, 100, 2);
        assert_eq!(
            classify(addresses(&["2001:db8::1", "127.0.1.1", "198.51.100.2"])),
            LookupResult::Addresses(vec![usable])
        );
        let unusable = |found| match classify(found) {
            LookupResult::Unusable(reason) => reason,
            other => panic!("{other:?}"),
        };
        assert!(unusable(addresses(&["2001:db8::1"])).contains("no IPv4 address"));
        assert!(unusable(addresses(&["127.0.1.1"])).contains("127.0.1.1, an address of this machine itself"));
        let many: Vec<IpAddr> = (0..100).map(|last| IpAddr::from([198, 51, 100, last])).collect();
        assert!(matches!(classify(Ok(many)), LookupResult::Addresses(few) if few.len() == MAX_ADDRESSES));
    }

    /// Every host knows `localhost`; its address is closed to workloads.
    #[tokio::test]
    async fn names_of_the_host_are_found() {
        let permits = Arc::new(Semaphore::new(1));
        let found = look_up("localhost".to_owned(), Arc::clone(&permits)).await;
        assert!(
            matches!(&found, LookupResult::Unusable(reason) if reason.contains("127.0.0.1")),
            "{found:?}"
        );
        assert_eq!(permits.available_permits(), 1);
    }

    #[tokio::test]
    async fn a_connection_that_was_not_redirected_is_refused() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (served, _) = listener.accept().await.unwrap();
        assert!(matches!(destination(&served), Err(Failure::Refused(_))));
        drop(client);
    }
}
