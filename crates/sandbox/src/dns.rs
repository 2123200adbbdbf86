//! The mesh's DNS server: the cluster's names, and no others.
//!
//! Answers come from a table that the mesh replaces whole ([`Names`]). Names under the cluster's domain that are
//! not in it do not exist; for all others there is nobody to ask, which is said at once (REFUSED) rather than
//! left to a timeout. UDP, and TCP for what does not fit (RFC 1035, section 4.2).

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
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

/// The table, shared by the mesh that writes it and the server that reads it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table(Arc<RwLock<Names>>);

impl Table {
    /// Replaces all names.
    pub(crate) fn replace(&self, names: Names) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// The reply to a message, cut short if it is longer than this; the client then asks again by TCP. What is no
    /// question gets none, or two servers could talk forever.
    pub(crate) fn reply(&self, message: &[u8], longest: usize) -> Option<Vec<u8>> {
        let request = Message::from_vec(message).ok()?;
        if request.metadata.message_type != MessageType::Query {
            return None;
        }
        let response = self.answer(&request);
        let bytes = response.to_vec().ok()?;
        if bytes.len() > longest { response.truncate().to_vec().ok() } else { Some(bytes) }
    }

    fn answer(&self, request: &Message) -> Message {
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
        let name = query.name().to_lowercase().to_ascii();
        match self.look_up(query.name(), name.trim_end_matches('.'), query.query_type()) {
            Ok(records) => {
                response.metadata.authoritative = true;
                response.add_answers(records);
            }
            Err(code) => response.metadata.response_code = code,
        }
        response
    }

    fn look_up(&self, name: &Name, text: &str, kind: RecordType) -> Result<Vec<Record>, ResponseCode> {
        let names = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let addresses = |name: &Name, addresses: &[Ipv4Addr]| -> Vec<Record> {
            // There is no IPv6 here; an empty answer to AAAA says that the name exists all the same.
            let wanted = matches!(kind, RecordType::A | RecordType::ANY);
            let addresses = addresses.iter().filter(|_| wanted);
            addresses.map(|ip| Record::from_rdata(name.clone(), TTL, RData::A(A(*ip)))).collect()
        };
        match names.get(text) {
            Some(Answer::Addresses(found)) => Ok(addresses(name, found)),
            Some(Answer::Alias(target)) => {
                let alias = Name::from_ascii(format!("{target}.")).map_err(|_| ResponseCode::ServFail)?;
                let mut records =
                    vec![Record::from_rdata(name.clone(), TTL, RData::CNAME(CNAME(alias.clone())))];
                if let Some(Answer::Addresses(found)) = names.get(target) {
                    records.extend(addresses(&alias, found));
                }
                Ok(records)
            }
            None if text == DOMAIN || text.ends_with(".cluster.local") => Err(ResponseCode::NXDomain),
            None => Err(ResponseCode::Refused),
        }
    }
}

/// Answers on this address, UDP and TCP, until an error.
pub(crate) async fn serve(address: SocketAddr, table: Table) -> io::Result<()> {
    let udp = UdpSocket::bind(address).await?;
    let tcp = TcpListener::bind(address).await?;
    tokio::try_join!(serve_udp(udp, &table), serve_tcp(tcp, &table)).map(|_| ())
}

async fn serve_udp(socket: UdpSocket, table: &Table) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let (length, from) = socket.recv_from(&mut buffer).await?;
        let Some(bytes) = table.reply(&buffer[..length], LONGEST_UDP) else { continue };
        // A client that is gone is no reason to stop.
        let _ = socket.send_to(&bytes, from).await;
    }
}

async fn serve_tcp(listener: TcpListener, table: &Table) -> io::Result<()> {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // A client that left at once, or no file descriptor free; other names are still asked for.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let table = table.clone();
        tokio::spawn(async move {
            let _ = serve_stream(stream, &table).await;
        });
    }
}

async fn serve_stream(mut stream: TcpStream, table: &Table) -> io::Result<()> {
    loop {
        let length = tokio::time::timeout(IDLE, stream.read_u16()).await??;
        let mut bytes = vec![0; usize::from(length)];
        tokio::time::timeout(IDLE, stream.read_exact(&mut bytes)).await??;
        let Some(answer) = table.reply(&bytes, usize::from(u16::MAX)) else { return Ok(()) };
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
        table.answer(&request)
    }

    #[test]
    fn answers_for_the_cluster_only() {
        let table = Table::default();
        let vip = Ipv4Addr::new(10, 96, 0, 1);
        table.replace(Names::from([
            ("a.default.svc.cluster.local".to_owned(), Answer::Addresses(vec![vip])),
            (
                "b.default.svc.cluster.local".to_owned(),
                Answer::Alias("a.default.svc.cluster.local".to_owned()),
            ),
        ]));
        let found = ask(&table, "A.default.svc.cluster.local.", RecordType::A);
        assert_eq!(found.answers.len(), 1);
        assert_eq!(found.answers[0].data, RData::A(A(vip)));
        let none = ask(&table, "a.default.svc.cluster.local.", RecordType::AAAA);
        assert_eq!((none.metadata.response_code, none.answers.len()), (ResponseCode::NoError, 0));
        assert_eq!(ask(&table, "b.default.svc.cluster.local.", RecordType::A).answers.len(), 2);
        let code = |name| ask(&table, name, RecordType::A).metadata.response_code;
        assert_eq!(code("c.default.svc.cluster.local."), ResponseCode::NXDomain);
        assert_eq!(code("example.com."), ResponseCode::Refused);
    }

    #[test]
    fn answers_are_not_answered_and_long_ones_are_cut() {
        let table = Table::default();
        let many = (0..100).map(|host| Ipv4Addr::new(10, 0, 0, host)).collect();
        table.replace(Names::from([("a.cluster.local".to_owned(), Answer::Addresses(many))]));
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii("a.cluster.local.").unwrap(), RecordType::A));
        let question = message.to_vec().unwrap();
        let cut = Message::from_vec(&table.reply(&question, LONGEST_UDP).unwrap()).unwrap();
        assert!(cut.metadata.truncation && cut.answers.is_empty());
        let whole = table.reply(&question, usize::from(u16::MAX)).unwrap();
        assert_eq!(Message::from_vec(&whole).unwrap().answers.len(), 100);
        assert_eq!(table.reply(&whole, LONGEST_UDP), None);
        assert_eq!(table.reply(b"", LONGEST_UDP), None);
    }
}
