//! Installs packet rules by nf_tables' own netlink protocol (linux/netfilter/nf_tables.h).
//!
//! No `nft` or `iptables` program is needed. One batch replaces all of our rules of a network namespace atomically. Tables
//! of other programs stay as they are.

use std::{fmt::Write as _, io};

use nix::libc;

use crate::{
    netlink::{Message, Socket},
    rules::{Family, Interface, Match, Network, Rule, Rules, Sender, Verdict},
};

const TABLE: &str = "skysail";

/// `NF_IP_PRI_NAT_DST` and `NF_IP_PRI_NAT_SRC`: the priorities of destination and source NAT.
const DESTINATION_PRIORITY: i32 = -100;
const SOURCE_PRIORITY: i32 = 100;
/// Numbers and names of hooks (`NF_INET_…`).
const PREROUTING: (u32, &str) = (0, "prerouting");
const OUTPUT: (u32, &str) = (3, "output");
const POSTROUTING: (u32, &str) = (4, "postrouting");
/// `LOOPBACK_IFINDEX`: `lo` is the first link of every namespace.
const LOOPBACK_INDEX: u32 = 1;

/// `NFT_NAT_SNAT` and `NFT_NAT_DNAT`.
const SOURCE: u32 = 0;
const DESTINATION: u32 = 1;
/// `IPS_DST_NAT` of a connection's status, in linux/netfilter/nf_conntrack_common.h.
const TRANSLATED: u32 = 1 << 5;

/// Registers: the verdict's, and two for values.
const VERDICT: u32 = 0;
const FIRST: u32 = 1;
const SECOND: u32 = 2;

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;

// Attribute numbers that the `libc` crate lacks.
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_IMMEDIATE_DREG: u16 = 1;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_META_DREG: u16 = 1;
const NFTA_META_KEY: u16 = 2;
const NFTA_PAYLOAD_DREG: u16 = 1;
const NFTA_PAYLOAD_BASE: u16 = 2;
const NFTA_PAYLOAD_OFFSET: u16 = 3;
const NFTA_PAYLOAD_LEN: u16 = 4;
const NFTA_BITWISE_SREG: u16 = 1;
const NFTA_BITWISE_DREG: u16 = 2;
const NFTA_BITWISE_LEN: u16 = 3;
const NFTA_BITWISE_MASK: u16 = 4;
const NFTA_BITWISE_XOR: u16 = 5;
const NFTA_NG_DREG: u16 = 1;
const NFTA_NG_MODULUS: u16 = 2;
const NFTA_NG_TYPE: u16 = 3;
const NFTA_CMP_SREG: u16 = 1;
const NFTA_CMP_OP: u16 = 2;
const NFTA_CMP_DATA: u16 = 3;
const NFTA_NAT_TYPE: u16 = 1;
const NFTA_NAT_FAMILY: u16 = 2;
const NFTA_NAT_REG_ADDR_MIN: u16 = 3;
const NFTA_NAT_REG_PROTO_MIN: u16 = 5;
const NFTA_REDIR_REG_PROTO_MIN: u16 = 1;
const NFTA_CT_DREG: u16 = 1;
const NFTA_CT_KEY: u16 = 2;

/// One of the two addresses of a packet.
#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}

/// A chain of rules.
struct Chain<'a> {
    name: &'static str,
    hook: (u32, &'static str),
    priority: i32,
    rules: &'a [Rule],
}

/// Replaces the rules of the socket's network namespace for these families.
///
/// # Errors
/// The kernel's error; `ENOENT`, `EOPNOTSUPP` and `EAFNOSUPPORT` mean that the kernel lacks a part of nf_tables.
pub fn replace(socket: &mut Socket, tables: &[(Family, &Rules)]) -> io::Result<()> {
    let mut messages = vec![bracket(libc::NFNL_MSG_BATCH_BEGIN)];
    for (family, rules) in tables {
        // The batch creates the table, deletes it and creates it again, so it works whether or not the table
        // exists.
        for kind in [libc::NFT_MSG_NEWTABLE, libc::NFT_MSG_DELTABLE, libc::NFT_MSG_NEWTABLE] {
            messages.push(table_message(kind, *family));
        }
        for chain in chains(rules) {
            messages.push(chain_message(&chain, *family));
            messages.extend(chain.rules.iter().map(|rule| rule_message(chain.name, rule, *family)));
        }
    }
    // The kernel answers a batch as a whole, in the order of its messages. Thousands of acknowledgements would exceed the
    // receive buffer.
    let last = messages.pop();
    let mut messages: Vec<Message> = messages.into_iter().map(Message::quiet).collect();
    messages.extend(last);
    messages.push(bracket(libc::NFNL_MSG_BATCH_END));
    socket.request(messages)
}

/// Returns the tables in the syntax of the program `nft`.
pub fn text(tables: &[(Family, &Rules)]) -> String {
    let mut text = String::new();
    for (family, rules) in tables {
        let _ = writeln!(text, "table {family} {TABLE} {{");
        for Chain { name, hook, priority, rules } in chains(rules) {
            let _ = writeln!(text, "\tchain {name} {{");
            let _ = writeln!(text, "\t\ttype nat hook {} priority {priority}; policy accept;", hook.1);
            for rule in rules {
                let _ = writeln!(text, "\t\t{rule}");
            }
            text.push_str("\t}\n");
        }
        text.push_str("}\n");
    }
    text
}

/// Returns the chains of a table. The one for packets that leave is needed only if it has rules.
fn chains(rules: &Rules) -> impl Iterator<Item = Chain<'_>> {
    let chain = |name, hook, priority, rules| Chain { name, hook, priority, rules };
    let always = [
        chain("output", OUTPUT, DESTINATION_PRIORITY, &rules.output),
        chain("input", PREROUTING, DESTINATION_PRIORITY, &rules.input),
    ];
    let leaving = chain("leaving", POSTROUTING, SOURCE_PRIORITY, &rules.leaving);
    always.into_iter().chain(Some(leaving).filter(|chain| !chain.rules.is_empty()))
}

fn bracket(kind: i32) -> Message {
    let subsystem = (libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes();
    Message::unanswered(kind as u16).raw(&[0, 0, subsystem[0], subsystem[1]])
}

/// Starts a message to nf_tables about a family.
fn start(kind: i32, flags: i32, family: Family) -> Message {
    let family = match family {
        Family::V4 => libc::NFPROTO_IPV4,
        Family::V6 => libc::NFPROTO_IPV6,
    };
    Message::new(SUBSYSTEM | kind as u16, flags).raw(&[family as u8, 0, 0, 0])
}

fn table_message(kind: i32, family: Family) -> Message {
    let flags = if kind == libc::NFT_MSG_NEWTABLE { libc::NLM_F_CREATE } else { 0 };
    start(kind, flags, family).text(NFTA_TABLE_NAME, TABLE)
}

fn chain_message(chain: &Chain<'_>, family: Family) -> Message {
    start(libc::NFT_MSG_NEWCHAIN, libc::NLM_F_CREATE, family)
        .text(NFTA_CHAIN_TABLE, TABLE)
        .text(NFTA_CHAIN_NAME, chain.name)
        .nested(NFTA_CHAIN_HOOK, |attributes| {
            let priority = u32::from_ne_bytes(chain.priority.to_ne_bytes());
            attributes.be32(NFTA_HOOK_HOOKNUM, chain.hook.0).be32(NFTA_HOOK_PRIORITY, priority)
        })
        .text(NFTA_CHAIN_TYPE, "nat")
}

fn rule_message(chain: &str, rule: &Rule, family: Family) -> Message {
    start(libc::NFT_MSG_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_APPEND, family)
        .text(NFTA_RULE_TABLE, TABLE)
        .text(NFTA_RULE_CHAIN, chain)
        .nested(NFTA_RULE_EXPRESSIONS, |list| {
            let list = rule.conditions.iter().fold(list, matching);
            verdict(list, rule.verdict)
        })
}

fn matching(list: Message, condition: &Match) -> Message {
    match condition {
        Match::Protocol(number) => equal(meta(list, libc::NFT_META_L4PROTO), &[*number]),
        Match::Sender(Sender::Mark(mark)) => equal(meta(list, libc::NFT_META_MARK), &mark.to_ne_bytes()),
        Match::Sender(Sender::User(user)) => equal(meta(list, libc::NFT_META_SKUID), &user.to_ne_bytes()),
        Match::Sender(Sender::Group(group)) => equal(meta(list, libc::NFT_META_SKGID), &group.to_ne_bytes()),
        Match::OutLoopback => equal(meta(list, libc::NFT_META_OIF), &LOOPBACK_INDEX.to_ne_bytes()),
        Match::Out(interface) => named(list, libc::NFT_META_OIFNAME, interface),
        Match::In(interface) => named(list, libc::NFT_META_IIFNAME, interface),
        Match::To(network) => within(list, Side::Destination, *network, libc::NFT_CMP_EQ),
        Match::NotTo(network) => within(list, Side::Destination, *network, libc::NFT_CMP_NEQ),
        Match::From(network) => within(list, Side::Source, *network, libc::NFT_CMP_EQ),
        // Source and destination ports have the same offset in TCP and UDP.
        Match::Port(port) => {
            equal(payload(list, libc::NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2), &port.to_be_bytes())
        }
        Match::OneIn(count) => equal(one_in(list, *count), &[0; 4]),
        Match::Translated => {
            let list = expression(list, "ct", |data| {
                data.be32(NFTA_CT_DREG, FIRST).be32(NFTA_CT_KEY, libc::NFT_CT_STATUS as u32)
            });
            compare(masked(list, &TRANSLATED.to_ne_bytes()), libc::NFT_CMP_NEQ, &[0; 4])
        }
    }
}

fn verdict(list: Message, verdict: Verdict) -> Message {
    match verdict {
        Verdict::Leave => expression(list, "immediate", |data| {
            data.be32(NFTA_IMMEDIATE_DREG, VERDICT).nested(NFTA_IMMEDIATE_DATA, |data| {
                data.nested(NFTA_DATA_VERDICT, |data| data.be32(NFTA_VERDICT_CODE, libc::NF_ACCEPT as u32))
            })
        }),
        Verdict::Redirect(port) => {
            let list = load(list, FIRST, &port.to_be_bytes());
            expression(list, "redir", |data| data.be32(NFTA_REDIR_REG_PROTO_MIN, FIRST))
        }
        Verdict::To(address, port) => {
            let list = load(load(list, FIRST, &address.octets()), SECOND, &port.to_be_bytes());
            expression(list, "nat", |data| {
                data.be32(NFTA_NAT_TYPE, DESTINATION)
                    .be32(NFTA_NAT_FAMILY, libc::NFPROTO_IPV4 as u32)
                    .be32(NFTA_NAT_REG_ADDR_MIN, FIRST)
                    .be32(NFTA_NAT_REG_PROTO_MIN, SECOND)
            })
        }
        Verdict::From(address) => expression(load(list, FIRST, &address.octets()), "nat", |data| {
            data.be32(NFTA_NAT_TYPE, SOURCE)
                .be32(NFTA_NAT_FAMILY, libc::NFPROTO_IPV4 as u32)
                .be32(NFTA_NAT_REG_ADDR_MIN, FIRST)
        }),
    }
}

fn expression(list: Message, name: &str, data: impl FnOnce(Message) -> Message) -> Message {
    list.nested(NFTA_LIST_ELEM, |element| element.text(NFTA_EXPR_NAME, name).nested(NFTA_EXPR_DATA, data))
}

fn meta(list: Message, key: i32) -> Message {
    expression(list, "meta", |data| data.be32(NFTA_META_DREG, FIRST).be32(NFTA_META_KEY, key as u32))
}

fn payload(list: Message, base: i32, offset: u32, length: u32) -> Message {
    expression(list, "payload", |data| {
        data.be32(NFTA_PAYLOAD_DREG, FIRST)
            .be32(NFTA_PAYLOAD_BASE, base as u32)
            .be32(NFTA_PAYLOAD_OFFSET, offset)
            .be32(NFTA_PAYLOAD_LEN, length)
    })
}

fn named(list: Message, key: i32, interface: &Interface) -> Message {
    equal(meta(list, key), &interface.bytes())
}

/// Compares an address in the IP header with a network.
fn within(list: Message, side: Side, network: Network, operator: i32) -> Message {
    let (address, mask) = network.bytes();
    let offset = match (network.family(), side) {
        (Family::V4, Side::Source) => 12,
        (Family::V4, Side::Destination) => 16,
        (Family::V6, Side::Source) => 8,
        (Family::V6, Side::Destination) => 24,
    };
    let list = payload(list, libc::NFT_PAYLOAD_NETWORK_HEADER, offset, address.len() as u32);
    compare(masked(list, &mask), operator, &address)
}

/// Clears the bits of the first register that a mask does not have.
fn masked(list: Message, mask: &[u8]) -> Message {
    expression(list, "bitwise", |data| {
        data.be32(NFTA_BITWISE_SREG, FIRST)
            .be32(NFTA_BITWISE_DREG, FIRST)
            .be32(NFTA_BITWISE_LEN, mask.len() as u32)
            .nested(NFTA_BITWISE_MASK, |data| value(data, mask))
            .nested(NFTA_BITWISE_XOR, |data| value(data, &vec![0; mask.len()]))
    })
}

fn one_in(list: Message, count: u32) -> Message {
    expression(list, "numgen", |data| {
        data.be32(NFTA_NG_DREG, FIRST)
            .be32(NFTA_NG_MODULUS, count)
            .be32(NFTA_NG_TYPE, libc::NFT_NG_RANDOM as u32)
    })
}

fn equal(list: Message, to: &[u8]) -> Message {
    compare(list, libc::NFT_CMP_EQ, to)
}

fn compare(list: Message, operator: i32, with: &[u8]) -> Message {
    expression(list, "cmp", |data| {
        data.be32(NFTA_CMP_SREG, FIRST)
            .be32(NFTA_CMP_OP, operator as u32)
            .nested(NFTA_CMP_DATA, |data| value(data, with))
    })
}

fn load(list: Message, register: u32, bytes: &[u8]) -> Message {
    expression(list, "immediate", |data| {
        data.be32(NFTA_IMMEDIATE_DREG, register).nested(NFTA_IMMEDIATE_DATA, |data| value(data, bytes))
    })
}

fn value(data: Message, bytes: &[u8]) -> Message {
    data.attribute(NFTA_DATA_VALUE, bytes)
}
