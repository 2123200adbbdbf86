//! `skysail up --publish`: ports of this machine that are forwarded into the mesh.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::Context as _;
use skysail_core::stdio;
use skysail_sandbox::{
    Survey,
    forward::{self, Failure},
    publish::{self, PublishedServicePort, Target},
};
use tokio::task::JoinSet;

use crate::view::Output;

/// A published port, as given on the command line: `[ADDRESS:]PORT:NAME:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortMapping {
    address: SocketAddr,
    name: String,
    port: u16,
}

/// Published ports that are bound but not served yet.
pub(crate) struct Published {
    /// Targets of the ports. A target has no listener if its port was in use.
    pub(crate) targets: Vec<Target>,
    /// Listeners, each with the index of its target.
    listeners: Vec<(usize, TcpListener)>,
    /// A line of output for each target.
    lines: Vec<String>,
}

impl FromStr for PortMapping {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("write [ADDRESS:]PORT:NAME:PORT, such as 8080:web:80, instead of {text:?}");
        let mut parts = text.rsplitn(3, ':');
        let port =
            parts.next().and_then(|port| port.parse().ok()).filter(|port| *port > 0).ok_or_else(wrong)?;
        let name = parts.next().filter(|name| !name.is_empty()).ok_or_else(wrong)?;
        let host = parts.next().ok_or_else(wrong)?;
        let local = host.parse().map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let address = local.or_else(|_| host.parse()).map_err(|_| wrong())?;
        Ok(Self { address, name: name.to_owned(), port })
    }
}

/// Listens on all ports of `--publish`, and on those of Services of type LoadBalancer or NodePort. Must be called
/// before the process enters the mesh.
pub(crate) fn open(mappings: &[PortMapping], survey: &Survey) -> anyhow::Result<Published> {
    let mut published = Published { targets: Vec::new(), listeners: Vec::new(), lines: Vec::new() };
    for PortMapping { address, name, port } in mappings {
        let what = || format!("--publish {address}:{name}:{port}");
        let target = survey.target(name, *port).with_context(what)?;
        let listener = forward::bind(*address).with_context(what)?;
        published.add(target, listener, "")?;
    }
    for opened in survey.opened() {
        if published.targets.contains(&opened.target) {
            continue;
        }
        match listen(&opened) {
            Ok((listener, note)) => published.add(opened.target, listener, &note)?,
            Err(error) => {
                let PublishedServicePort { target, kind, .. } = opened;
                published.lines.push(format!("not published  {target} ({kind}): {error}"));
                published.targets.push(target);
            }
        }
    }
    Ok(published)
}

/// Binds the port that a Service asks for, or a free one if the port is flexible. Returns a note for the user.
fn listen(opened: &PublishedServicePort) -> io::Result<(TcpListener, String)> {
    let PublishedServicePort { kind, port, is_flexible, .. } = opened;
    let bind = |port| forward::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    // Lower ports need root, and another server often uses them.
    let preferred = port.filter(|port| !is_flexible || *port >= 1024);
    match preferred.map(bind) {
        Some(Ok(listener)) => Ok((listener, format!(" ({kind})"))),
        Some(Err(error)) if *is_flexible => {
            let why = match error.kind() {
                io::ErrorKind::AddrInUse => "its port is in use".to_owned(),
                _ => error.to_string(),
            };
            Ok((bind(0)?, format!(" ({kind}, on a free port: {why})")))
        }
        Some(Err(error)) => Err(error),
        None => Ok((bind(0)?, format!(" ({kind}, on a free port)"))),
    }
}

impl Published {
    fn add(&mut self, target: Target, listener: TcpListener, note: &str) -> anyhow::Result<()> {
        self.lines.push(format!("published  {} -> {target}{note}", target.at(listener.local_addr()?)));
        self.listeners.push((self.targets.len(), listener));
        self.targets.push(target);
        Ok(())
    }

    /// Prints the addresses of the ports.
    pub(crate) fn announce(&self, output: Output) -> anyhow::Result<()> {
        for line in &self.lines {
            match output {
                Output::Text => stdio::print(line)?,
                Output::Json => stdio::print_error(line),
            }
        }
        Ok(())
    }

    /// Forwards connections to ready pods of the mesh in this folder, in round-robin order. Must run in the mesh's
    /// network namespace.
    pub(crate) async fn serve(self, folder: PathBuf) {
        let mut forwards = JoinSet::new();
        for (number, listener) in self.listeners {
            let (folder, turn) = (folder.clone(), AtomicUsize::new(0));
            let pods = move || {
                let mut pods = publish::ready(&folder, number);
                let first = turn.fetch_add(1, Ordering::Relaxed) % pods.len().max(1);
                pods.rotate_left(first);
                pods
            };
            let (target, last) = (self.targets[number].to_string(), Arc::new(Mutex::new(None)));
            let failed = move |failure: Failure| {
                let hint = match failure {
                    Failure::NoAnswer => "; a PeerAuthentication of mode STRICT refuses plain text",
                    _ => "",
                };
                // Clients retry, so repeated failures are printed once.
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.as_ref() != Some(&failure) {
                    stdio::print_error(format!(
                        "skysail: a connection to the published {target}: {failure}{hint}"
                    ));
                    *last = Some(failure);
                }
            };
            forwards.spawn(forward::serve(listener, pods, failed));
        }
        while let Some(ended) = forwards.join_next().await {
            if let Ok(Err(error)) = ended {
                stdio::print_error(format!("skysail: a published port is no longer served: {error}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of a mesh with these Services, and the number of listeners.
    fn lines(mappings: &[&str], services: &[(&str, String)]) -> (Vec<String>, usize) {
        let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, labels: {app: web}}\n\
                   spec: {containers: [{name: web, image: acme/web}]}\n";
        let services = services.iter().map(|(name, spec)| {
            format!(
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
                 spec: {{selector: {{app: web}}, {spec}}}\n"
            )
        });
        let text: String = std::iter::once(pod.to_owned()).chain(services).collect();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yaml"), text).unwrap();
        let survey = Survey::read(&[folder.path().to_owned()], None).unwrap();
        let mappings: Vec<PortMapping> = mappings.iter().map(|text| text.parse().unwrap()).collect();
        let published = open(&mappings, &survey).unwrap();
        assert_eq!(published.targets.len(), published.lines.len());
        (published.lines, published.listeners.len())
    }

    fn any() -> (TcpListener, u16) {
        let listener = forward::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    #[test]
    fn a_service_whose_port_is_in_use_gets_another_or_none() {
        let (_taken, used) = any();
        let services = [
            ("a", format!("type: LoadBalancer, ports: [{{port: {used}}}]")),
            ("b", format!("type: NodePort, ports: [{{port: 80, nodePort: {used}}}]")),
            ("c", "type: NodePort, ports: [{name: tcp, port: 80}]".to_owned()),
            ("d", "type: LoadBalancer, ports: [{port: 81}]".to_owned()),
        ];
        // A port of `--publish` is not published a second time.
        let (lines, listening) = lines(&["0:d:81"], &services);
        assert_eq!((lines.len(), listening), (4, 3), "{lines:#?}");
        let not = format!(
            "not published  default/b:80 (NodePort): 127.0.0.1:{used} is in use; choose another port"
        );
        assert_eq!(lines[2], not);
        for (line, start, end) in [
            (&lines[0], "published  http://127.0.0.1:", " -> default/d:81"),
            (
                &lines[1],
                "published  http://127.0.0.1:",
                " (LoadBalancer, on a free port: its port is in use)",
            ),
            (&lines[3], "published  127.0.0.1:", " -> default/c:80 (NodePort, on a free port)"),
        ] {
            assert!(line.starts_with(start) && line.ends_with(end), "{line}");
        }
    }

    #[test]
    fn a_load_balancer_gets_its_own_port_if_it_is_free() {
        // Another program may take the port meanwhile, but not in every attempt.
        let gets_it = |_| {
            let port = any().1;
            let service = ("a", format!("type: LoadBalancer, ports: [{{port: {port}}}]"));
            let line = format!("published  http://127.0.0.1:{port} -> default/a:{port} (LoadBalancer)");
            lines(&[], &[service]) == (vec![line], 1)
        };
        assert!((0..10).any(gets_it));
    }

    #[test]
    fn port_mappings_are_parsed_from_the_right() {
        let mapping = |text: &str| {
            let PortMapping { address, name, port } = text.parse()?;
            Ok::<_, String>(format!("{address} {name} {port}"))
        };
        for (text, expected) in [
            ("8080:web:80", "127.0.0.1:8080 web 80"),
            ("0:shop/web:80", "127.0.0.1:0 shop/web 80"),
            ("0.0.0.0:8080:web:80", "0.0.0.0:8080 web 80"),
            ("[::1]:8080:web:80", "[::1]:8080 web 80"),
        ] {
            assert_eq!(mapping(text).as_deref(), Ok(expected));
        }
        for text in
            ["", "8080", "8080:80", "8080:web", "8080::80", "web:8080:80", "8080:web:0", "x:8080:web:80"]
        {
            assert!(mapping(text).unwrap_err().contains("8080:web:80"), "{text}");
        }
    }
}
