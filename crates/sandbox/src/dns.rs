//! The mesh's DNS server: the cluster's names, hosts of ServiceEntries, and no others.
//!
//! Answers come from a table that the mesh replaces whole ([`Names`]). There is no network beyond the mesh, so what
//! is not in the table does not exist (NXDOMAIN), whatever its domain: a program then gives up at once, and goes on
//! to the next of its search domains, where an error would make it try again. Who asks for a name outside the
//! cluster's domain is told to the mesh. UDP, and TCP for what does not fit (RFC 1035, section 4.2).

use std::{
    collections::BTreeMap,
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

/// The cluster's domain.
pub(crate) const DOMAIN: &str = "cluster.local";
/// Answers may be kept this long: pods of headless services come and go.
const TTL: u32 = 5;
/// RFC 1035, section 4.2.1.
const LONGEST_UDP: usize = 512;
/// A TCP client that says nothing for this long is let go.
const IDLE: Duration = Duration::from_secs(10);
/// After a connection that could not be taken.
const PAUSE: Duration = Duration::from_millis(50);
/// A name may stand for another so many times over.
const LONGEST_CHAIN: usize = 8;

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// These addresses; none means that the name is there but nothing behind it is ready.
    Addresses(Vec<Ipv4Addr>),
    /// Another name.
    Alias(String),
}

/// Fully qualified names in lower case, without the last dot.
pub(crate) type Names = BTreeMap<String, Answer>;

/// The hosts that a client sees beside the cluster's names, by its address: those of the ServiceEntries for its namespace.
pub(crate) type Hosts = BTreeMap<Ipv4Addr, Arc<Names>>;

/// The table, shared by the mesh that writes it and the server that reads it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table(Arc<RwLock<(Names, Hosts)>>);

impl Table {
    /// Replaces all names.
    pub(crate) fn replace(&self, names: Names, hosts: Hosts) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = (names, hosts);
    }

    /// The reply to a message, cut short if it is longer than this; the client then asks again by TCP. What is no
    /// question gets none, or two servers could talk forever. With it, the name that does not exist, if that is so.
    pub(crate) fn reply(
        &self,
        message: &[u8],
        longest: usize,
        asked_by: IpAddr,
    ) -> Option<(Vec<u8>, Option<String>)> {
        let request = Message::from_vec(message).ok()?;
        if request.metadata.message_type != MessageType::Query {
            return None;
        }
        let response = self.answer(&request, asked_by);
        let missing = response.metadata.response_code == ResponseCode::NXDomain;
        let missing = response.queries.first().filter(|_| missing).map(|query| plain(query.name()));
        let bytes = response.to_vec().ok()?;
        let bytes = if bytes.len() > longest { response.truncate().to_vec().ok()? } else { bytes };
        Some((bytes, missing))
    }

    fn answer(&self, request: &Message, asked_by: IpAddr) -> Message {
        let mut response = Message::response(request.metadata.id, request.metadata.op_code);
        response.metadata.recursion_desired = request.metadata.recursion_desired;
        response.metadata.recursion_available = true;
        response.add_queries(request.queries.iter().cloned());
        let [query] = request.queries.as_slice() else {
            response.metadata.response_code = ResponseCode::FormErr;
            return response;
        };
        if request.metadata.op_code != OpCode::Query {
            response.metadata.response_code = ResponseCode::NotImp;
            return response;
        }
        let (code, records) = self.look_up(query.name(), query.query_type(), asked_by);
        response.metadata.authoritative = true;
        response.metadata.response_code = code;
        response.add_answers(records);
        response
    }

    /// The records for a name, by way of its aliases. The code is about the last of them (RFC 6604, section 2.1).
    fn look_up(&self, name: &Name, kind: RecordType, asked_by: IpAddr) -> (ResponseCode, Vec<Record>) {
        let (names, hosts) = &*self.0.read().unwrap_or_else(PoisonError::into_inner);
        let hosts = match asked_by.to_canonical() {
            IpAddr::V4(address) => hosts.get(&address),
            IpAddr::V6(_) => None,
        };
        let mut records = Vec::new();
        let mut name = name.clone();
        for _ in 0..LONGEST_CHAIN {
            let key = plain(&name);
            match names.get(&key).or_else(|| hosts?.get(&key)) {
                Some(Answer::Addresses(found)) => {
                    // There is no IPv6 here; an empty answer to AAAA says that the name exists all the same.
                    let wanted = matches!(kind, RecordType::A | RecordType::ANY);
                    let found = found.iter().filter(|_| wanted);
                    records.extend(found.map(|ip| Record::from_rdata(name.clone(), TTL, RData::A(A(*ip)))));
                    return (ResponseCode::NoError, records);
                }
                Some(Answer::Alias(target)) => {
                    let Ok(alias) = Name::from_ascii(format!("{target}.")) else { break };
                    records.push(Record::from_rdata(name, TTL, RData::CNAME(CNAME(alias.clone()))));
                    name = alias;
                }
                None => return (ResponseCode::NXDomain, records),
            }
        }
        (ResponseCode::ServFail, Vec::new())
    }
}

/// A name as the table has it.
fn plain(name: &Name) -> String {
    name.to_lowercase().to_ascii().trim_end_matches('.').to_owned()
}

/// Somebody asked for a name that is outside the cluster's domain and not in the table.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) name: String,
    pub(crate) asked_by: IpAddr,
}

/// The server, which tells of questions it has no answer to.
struct Server {
    table: Table,
    outside: mpsc::Sender<Outside>,
}

impl Server {
    fn reply(&self, message: &[u8], longest: usize, asked_by: IpAddr) -> Option<Vec<u8>> {
        let (reply, missing) = self.table.reply(message, longest, asked_by)?;
        // Who looks up whose an address is (arpa) can do without the answer.
        let beyond = |name: &String| !in_domain(name, DOMAIN) && !in_domain(name, "arpa");
        if let Some(name) = missing.filter(beyond) {
            // If many ask at once, those that are told of will do.
            let _ = self.outside.try_send(Outside { name, asked_by });
        }
        Some(reply)
    }
}

fn in_domain(name: &str, domain: &str) -> bool {
    name.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Answers on this address, UDP and TCP, until an error. What is asked for in vain outside the cluster's domain goes
/// to `outside`.
pub(crate) async fn serve(
    address: SocketAddr,
    table: Table,
    outside: mpsc::Sender<Outside>,
) -> io::Result<()> {
    let server = Arc::new(Server { table, outside });
    let udp = UdpSocket::bind(address).await?;
    let tcp = TcpListener::bind(address).await?;
    tokio::try_join!(serve_udp(udp, &server), serve_tcp(tcp, &server)).map(|_| ())
}

async fn serve_udp(socket: UdpSocket, server: &Server) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let (length, from) = socket.recv_from(&mut buffer).await?;
        let Some(bytes) = server.reply(&buffer[..length], LONGEST_UDP, from.ip()) else { continue };
        // A client that is gone is no reason to stop.
        let _ = socket.send_to(&bytes, from).await;
    }
}

async fn serve_tcp(listener: TcpListener, server: &Arc<Server>) -> io::Result<()> {
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            // A client that left at once, or no file descriptor free; other names are still asked for.
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
        let length = tokio::time::timeout(IDLE, stream.read_u16()).await??;
        let mut bytes = vec![0; usize::from(length)];
        tokio::time::timeout(IDLE, stream.read_exact(&mut bytes)).await??;
        let Some(answer) = server.reply(&bytes, usize::from(u16::MAX), from) else { return Ok(()) };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        stream.write_all(&[&length.to_be_bytes(), answer.as_slice()].concat()).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::op::Query;

    fn ask(table: &Table, name: &str, kind: RecordType) -> Message {
        let mut request = Message::query();
        request.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        table.answer(&request, POD)
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
    fn what_is_not_in_the_table_does_not_exist() {
        let table = table();
        let found = ask(&table, "A.default.svc.cluster.local.", RecordType::A);
        assert_eq!(found.answers.len(), 1);
        assert_eq!(found.answers[0].data, RData::A(A(VIP)));
        let none = ask(&table, "a.default.svc.cluster.local.", RecordType::AAAA);
        assert_eq!((none.metadata.response_code, none.answers.len()), (ResponseCode::NoError, 0));
        assert_eq!(ask(&table, "b.default.svc.cluster.local.", RecordType::A).answers.len(), 2);
        let code = |name| ask(&table, name, RecordType::A).metadata.response_code;
        assert_eq!(code("d.default.svc.cluster.local."), ResponseCode::NXDomain);
        // What a resolver tries on its way through the search domains, and at last the name as it stands.
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
    fn hosts_are_answered_to_the_pods_that_see_them() {
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

    #[test]
    fn questions_for_names_outside_are_told() {
        let (outside, mut told) = mpsc::channel(8);
        let server = Server { table: table(), outside };
        for name in
            ["a.default.svc.cluster.local.", "x.cluster.local.", "1.0.0.10.in-addr.arpa.", "Example.com."]
        {
            let mut message = Message::query();
            message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
            server.reply(&message.to_vec().unwrap(), LONGEST_UDP, VIP.into()).unwrap();
        }
        let Outside { name, asked_by } = told.try_recv().unwrap();
        assert_eq!((name.as_str(), asked_by), ("example.com", VIP.into()));
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn answers_are_not_answered_and_long_ones_are_cut() {
        let table = Table::default();
        let many = (0..100).map(|host| Ipv4Addr::new(10, 0, 0, host)).collect();
        table.replace(Names::from([("a.cluster.local".to_owned(), Answer::Addresses(many))]), Hosts::new());
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii("a.cluster.local.").unwrap(), RecordType::A));
        let question = message.to_vec().unwrap();
        let cut = Message::from_vec(&table.reply(&question, LONGEST_UDP, POD).unwrap().0).unwrap();
        assert!(cut.metadata.truncation && cut.answers.is_empty());
        let (whole, _) = table.reply(&question, usize::from(u16::MAX), POD).unwrap();
        assert_eq!(Message::from_vec(&whole).unwrap().answers.len(), 100);
        assert_eq!(table.reply(&whole, LONGEST_UDP, POD), None);
        assert_eq!(table.reply(b"", LONGEST_UDP, POD), None);
    }
}
