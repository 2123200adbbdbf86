//! The mesh's DNS server: names of the cluster and hosts of ServiceEntries.
//!
//! Answers come from a table that the mesh replaces as a whole ([`Names`]). Without egress, a name that is not in the
//! table does not exist (NXDOMAIN), whatever its domain. A program then tries its next search domain at once; an error
//! would make it retry. With egress ([`Lookups`]), the host's resolver looks up names outside the cluster's domain.
//! Failed lookups of such names are reported to the mesh. The server uses UDP, and TCP for responses that do not fit
//! (RFC 1035, section 4.2).

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, CNAME},
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::mpsc,
};

use crate::{
    egress::{self, LookupResult, Lookups},
    names::{Answer, DOMAIN, Hosts, Names},
};

/// Time to live of answers, in seconds. It is short because pods of headless Services change.
const TTL: u32 = 5;
/// Maximum size of a UDP response, in bytes. Source: RFC 1035, section 4.2.1.
const MAX_UDP: usize = 512;
/// Idle timeout of a TCP client.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(50);
/// Maximum number of aliases that are followed.
const MAX_ALIASES: usize = 8;

/// The table. The mesh writes it, the server reads it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table(Arc<RwLock<(Names, Hosts)>>);

impl Table {
    /// Replaces all names.
    pub(crate) fn replace(&self, names: Names, hosts: Hosts) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = (names, hosts);
    }

    /// Returns the response to a request, and the name that the table lacks, if any.
    fn answer(&self, request: &Message, asked_by: IpAddr) -> (Message, Option<Name>) {
        let mut response = Message::response(request.metadata.id, request.metadata.op_code);
        response.metadata.recursion_desired = request.metadata.recursion_desired;
        response.metadata.recursion_available = true;
        response.add_queries(request.queries.iter().cloned());
        let [query] = request.queries.as_slice() else {
            response.metadata.response_code = ResponseCode::FormErr;
            return (response, None);
        };
        if request.metadata.op_code != OpCode::Query {
            response.metadata.response_code = ResponseCode::NotImp;
            return (response, None);
        }
        let (code, records, missing) = self.look_up(query.name(), query.query_type(), asked_by);
        response.metadata.authoritative = true;
        response.metadata.response_code = code;
        response.add_answers(records);
        (response, missing)
    }

    /// Returns the records of a name and follows its aliases. The response code is that of the last name (RFC 6604,
    /// section 3). This name is also returned if the table lacks it.
    fn look_up(
        &self,
        name: &Name,
        kind: RecordType,
        asked_by: IpAddr,
    ) -> (ResponseCode, Vec<Record>, Option<Name>) {
        let (names, hosts) = &*self.0.read().unwrap_or_else(PoisonError::into_inner);
        let hosts = match asked_by.to_canonical() {
            IpAddr::V4(address) => hosts.get(&address),
            IpAddr::V6(_) => None,
        };
        let mut records = Vec::new();
        let mut name = name.clone();
        for _ in 0..MAX_ALIASES {
            let key = plain(&name);
            match names.get(&key).or_else(|| hosts?.get(&key)) {
                Some(Answer::Addresses(found)) => {
                    records.extend(addresses(&name, found, kind));
                    return (ResponseCode::NoError, records, None);
                }
                Some(Answer::Alias(target)) => {
                    let Ok(alias) = Name::from_ascii(format!("{target}.")) else { break };
                    records.push(Record::from_rdata(name, TTL, RData::CNAME(CNAME(alias.clone()))));
                    name = alias;
                }
                None => return (ResponseCode::NXDomain, records, Some(name)),
            }
        }
        (ResponseCode::ServFail, Vec::new(), None)
    }
}

/// Returns the records of addresses. There are no IPv6 addresses; an empty answer to AAAA says that the name exists.
fn addresses(name: &Name, found: &[Ipv4Addr], kind: RecordType) -> impl Iterator<Item = Record> {
    let wanted = matches!(kind, RecordType::A | RecordType::ANY);
    found.iter().filter(move |_| wanted).map(|ip| Record::from_rdata(name.clone(), TTL, RData::A(A(*ip))))
}

/// Returns a name in the form of the table's keys.
fn plain(name: &Name) -> String {
    name.to_lowercase().to_ascii().trim_end_matches('.').to_owned()
}

/// A query for a name outside the cluster's domain that has no answer.
#[derive(Debug)]
pub(crate) struct FailedLookup {
    pub(crate) name: String,
    pub(crate) asked_by: IpAddr,
    /// Result of the host's resolver; `None` without egress.
    pub(crate) found: Option<LookupResult>,
}

/// A query after its lookup in the table.
struct PendingReply {
    response: Message,
    /// Name outside the cluster's domain that the table lacks.
    outside: Option<Name>,
    by: IpAddr,
}

/// The server. It reports failed lookups to `outside`.
pub(crate) struct Server {
    pub(crate) table: Table,
    pub(crate) lookups: Option<Arc<Lookups>>,
    pub(crate) outside: mpsc::Sender<FailedLookup>,
}

impl Server {
    /// Returns the reply to a message, of at most this length.
    pub(crate) async fn answer(&self, message: &[u8], max_size: usize, by: IpAddr) -> Option<Vec<u8>> {
        self.reply(self.ask(message, by)?, max_size).await
    }

    /// Looks up the name of a query in the table. Other messages get no answer; otherwise two servers could answer each
    /// other forever.
    fn ask(&self, message: &[u8], by: IpAddr) -> Option<PendingReply> {
        let request = Message::from_vec(message).ok()?;
        if request.metadata.message_type != MessageType::Query {
            return None;
        }
        let (response, missing) = self.table.answer(&request, by);
        // Failed reverse lookups (arpa) are harmless.
        let is_outside = |name: &String| ![DOMAIN, "arpa"].iter().any(|domain| in_domain(name, domain));
        let outside = missing.filter(|name| is_outside(&plain(name)));
        Some(PendingReply { response, outside, by })
    }

    /// Completes the response with a lookup by the host's resolver if that is needed and enabled. Truncates it to the
    /// maximum length; the client then retries over TCP.
    async fn reply(&self, pending: PendingReply, max_size: usize) -> Option<Vec<u8>> {
        let PendingReply { mut response, outside, by } = pending;
        if let Some(name) = outside {
            let plain = plain(&name);
            let found = match &self.lookups {
                Some(lookups) if egress::is_host(&plain) => Some(lookups.find(&plain).await),
                Some(_) => Some(LookupResult::Missing),
                None => None,
            };
            if let Some(found) = &found {
                complete(&mut response, &name, found);
            }
            if !matches!(found, Some(LookupResult::Addresses(_))) {
                // When the channel is full, the failures in it are sufficient.
                let _ = self.outside.try_send(FailedLookup { name: plain, asked_by: by, found });
            }
        }
        let bytes = response.to_vec().ok()?;
        if bytes.len() > max_size { response.truncate().to_vec().ok() } else { Some(bytes) }
    }
}

/// Completes a response with the result of the host's resolver.
fn complete(response: &mut Message, name: &Name, found: &LookupResult) {
    let kind = response.queries.first().map_or(RecordType::A, |query| query.query_type());
    response.metadata.authoritative = false;
    response.metadata.response_code = match found {
        LookupResult::Addresses(_) | LookupResult::Unusable(_) => ResponseCode::NoError,
        LookupResult::Missing => ResponseCode::NXDomain,
        LookupResult::Failed(_) => ResponseCode::ServFail,
    };
    if let LookupResult::Addresses(found) = found {
        response.add_answers(addresses(name, found, kind));
    }
}

fn in_domain(name: &str, domain: &str) -> bool {
    name.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Serves DNS on this address over UDP and TCP. Returns on an error only.
pub(crate) async fn serve(address: SocketAddr, server: Server) -> io::Result<()> {
    let server = Arc::new(server);
    let udp = UdpSocket::bind(address).await?;
    let tcp = TcpListener::bind(address).await?;
    tokio::try_join!(serve_udp(Arc::new(udp), &server), serve_tcp(tcp, &server)).map(|_| ())
}

async fn serve_udp(socket: Arc<UdpSocket>, server: &Arc<Server>) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let (length, from) = socket.recv_from(&mut buffer).await?;
        let Some(pending) = server.ask(&buffer[..length], from.ip()) else { continue };
        let is_slow = pending.outside.is_some() && server.lookups.is_some();
        let (socket, server) = (Arc::clone(&socket), Arc::clone(server));
        let answering = async move {
            if let Some(bytes) = server.reply(pending, MAX_UDP).await {
                // Ignored, because the client may be gone.
                let _ = socket.send_to(&bytes, from).await;
            }
        };
        // The lookups bound the number of tasks.
        if is_slow { _ = tokio::spawn(answering) } else { answering.await }
    }
}

async fn serve_tcp(listener: TcpListener, server: &Arc<Server>) -> io::Result<()> {
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            // The client has left, or no file descriptor is free.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let server = Arc::clone(server);
        tokio::spawn(async move {
            let _ = serve_stream(stream, &server, from.ip()).await;
        });
    }
}

async fn serve_stream(mut stream: TcpStream, server: &Server, from: IpAddr) -> io::Result<()> {
    loop {
        let length = tokio::time::timeout(IDLE_TIMEOUT, stream.read_u16()).await??;
        let mut bytes = vec![0; usize::from(length)];
        tokio::time::timeout(IDLE_TIMEOUT, stream.read_exact(&mut bytes)).await??;
        let Some(answer) = server.answer(&bytes, usize::from(u16::MAX), from).await else { return Ok(()) };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        stream.write_all(&[&length.to_be_bytes(), answer.as_slice()].concat()).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use hickory_proto::op::Query;

    fn ask(table: &Table, name: &str, kind: RecordType) -> Message {
        let mut request = Message::query();
        request.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        table.answer(&request, POD).0
    }

    fn server(table: Table) -> (Server, mpsc::Receiver<FailedLookup>) {
        let (outside, failed_lookups) = mpsc::channel(8);
        (Server { table, lookups: None, outside }, failed_lookups)
    }

    fn question(name: &str) -> Vec<u8> {
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
        message.to_vec().unwrap()
    }

    const VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
    const POD: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 244, 0, 2));

    fn table() -> Table {
        let table = Table::default();
        let full = |name: &str| format!("{name}.default.svc.cluster.local");
        table.replace(
            Names::from([
                (full("a"), Answer::Addresses(vec![VIP])),
                (full("b"), Answer::Alias(full("a"))),
                (full("c"), Answer::Alias(full("b"))),
                (full("away"), Answer::Alias("example.com".to_owned())),
                (full("round"), Answer::Alias(full("round"))),
            ]),
            Hosts::new(),
        );
        table
    }

    #[test]
    fn a_name_that_is_not_in_the_table_does_not_exist() {
        let table = table();
        let found = ask(&table, "A.default.svc.cluster.local.", RecordType::A);
        assert_eq!(found.answers.len(), 1);
        assert_eq!(found.answers[0].data, RData::A(A(VIP)));
        let none = ask(&table, "a.default.svc.cluster.local.", RecordType::AAAA);
        assert_eq!((none.metadata.response_code, none.answers.len()), (ResponseCode::NoError, 0));
        assert_eq!(ask(&table, "b.default.svc.cluster.local.", RecordType::A).answers.len(), 2);
        let code = |name| ask(&table, name, RecordType::A).metadata.response_code;
        assert_eq!(code("d.default.svc.cluster.local."), ResponseCode::NXDomain);
        // The names that a resolver tries by its search domains, and the name itself.
        for tried in ["a.default.cluster.local.", "example.com.cluster.local.", "example.com.", "a."] {
            assert_eq!(code(tried), ResponseCode::NXDomain, "{tried}");
            assert_eq!(ask(&table, tried, RecordType::AAAA).metadata.response_code, ResponseCode::NXDomain);
        }
    }

    #[test]
    fn aliases_are_followed_to_their_end() {
        let ask = |name: &str| {
            let answer = ask(&table(), &format!("{name}.default.svc.cluster.local."), RecordType::A);
            (answer.metadata.response_code, answer.answers.len())
        };
        assert_eq!(ask("c"), (ResponseCode::NoError, 3));
        assert_eq!(ask("away"), (ResponseCode::NXDomain, 1));
        assert_eq!(ask("round"), (ResponseCode::ServFail, 0));
    }

    #[test]
    fn hosts_are_visible_to_their_pods_only() {
        let table = Table::default();
        let names = Names::from([("a.svc".to_owned(), Answer::Alias("api.example.com".to_owned()))]);
        let hosts = Names::from([("api.example.com".to_owned(), Answer::Addresses(vec![VIP]))]);
        let sees = Ipv4Addr::new(10, 244, 0, 2);
        table.replace(names, Hosts::from([(sees, Arc::new(hosts))]));
        let code = |name: &str, by: Ipv4Addr| {
            table.look_up(&Name::from_ascii(name).unwrap(), RecordType::A, by.into()).0
        };
        assert_eq!(code("API.example.com.", sees), ResponseCode::NoError);
        assert_eq!(code("a.svc.", sees), ResponseCode::NoError);
        assert_eq!(code("api.example.com.", Ipv4Addr::new(10, 244, 0, 3)), ResponseCode::NXDomain);
    }

    #[tokio::test]
    async fn failed_lookups_of_names_outside_are_reported() {
        let (server, mut failed_lookups) = server(table());
        for name in [
            "a.default.svc.cluster.local.",
            "x.cluster.local.",
            "1.0.0.10.in-addr.arpa.",
            "Example.org.",
            "away.default.svc.cluster.local.",
        ] {
            server.answer(&question(name), MAX_UDP, POD).await.unwrap();
        }
        // The last one is an alias.
        for expected in ["example.org", "example.com"] {
            let FailedLookup { name, asked_by, found } = failed_lookups.try_recv().unwrap();
            assert_eq!((name.as_str(), asked_by, found), (expected, POD, None));
        }
        assert!(failed_lookups.try_recv().is_err());
    }

    #[tokio::test]
    async fn names_outside_are_looked_up_by_the_host() {
        let (lookups, forwarder) = egress::lookups();
        let (mut server, mut failed_lookups) = server(table());
        server.lookups = Some(lookups);
        let answers = async |name: &str| {
            let message = Message::from_vec(&server.answer(&question(name), MAX_UDP, POD).await.unwrap());
            let Message { metadata, answers, .. } = message.unwrap();
            let addresses = answers.iter().filter(|record| matches!(record.data, RData::A(_))).count();
            (metadata.response_code, addresses)
        };
        let ip = Ipv4Addr::new(198, 51, 100, 2);
        let found = |name: &str| match name {
            "example.com" => LookupResult::Addresses(vec![ip, ip]),
            "v6.example" => LookupResult::Unusable("no IPv4".to_owned()),
            "down.example" => LookupResult::Failed("down".to_owned()),
            _ => LookupResult::Missing,
        };
        let test = async {
            assert_eq!(answers("Example.com.").await, (ResponseCode::NoError, 2));
            assert_eq!(answers("away.default.svc.cluster.local.").await, (ResponseCode::NoError, 2));
            assert!(failed_lookups.try_recv().is_err());
            assert_eq!(answers("v6.example.").await, (ResponseCode::NoError, 0));
            assert_eq!(answers("down.example.").await, (ResponseCode::ServFail, 0));
            assert_eq!(answers("no.example.").await, (ResponseCode::NXDomain, 0));
            assert_eq!(
                failed_lookups.try_recv().unwrap().found,
                Some(LookupResult::Unusable("no IPv4".to_owned()))
            );
        };
        forwarder.answer_during(found, test).await;
        // The forwarder is gone, and these names need no lookup.
        for name in [
            "example.com.default.svc.cluster.local.",
            "example.com.cluster.local.",
            "db.",
            "1.0.0.10.in-addr.arpa.",
            "10.0.0.1.",
        ] {
            let answer = server.answer(&question(name), MAX_UDP, POD).now_or_never();
            let answer = Message::from_vec(&answer.unwrap().unwrap()).unwrap();
            assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain, "{name}");
        }
    }

    #[tokio::test]
    async fn responses_get_no_answer_and_long_ones_are_truncated() {
        let table = Table::default();
        let many = (0..100).map(|host| Ipv4Addr::new(10, 0, 0, host)).collect();
        table.replace(Names::from([("a.cluster.local".to_owned(), Answer::Addresses(many))]), Hosts::new());
        let (server, _told) = server(table);
        let question = question("a.cluster.local.");
        let cut = Message::from_vec(&server.answer(&question, MAX_UDP, POD).await.unwrap()).unwrap();
        assert!(cut.metadata.truncation && cut.answers.is_empty());
        let whole = server.answer(&question, usize::from(u16::MAX), POD).await.unwrap();
        assert_eq!(Message::from_vec(&whole).unwrap().answers.len(), 100);
        assert_eq!(server.answer(&whole, MAX_UDP, POD).await, None);
        assert_eq!(server.answer(b"", MAX_UDP, POD).await, None);
    }
}
