//! Descriptors of a gRPC server's services: from the server itself (reflection), or from a file.
//!
//! Source: `grpc/reflection/v1/reflection.proto`. Each query is a call of its own, so a server need not support several
//! queries on one stream.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use prost::Message as _;
use prost_reflect::{DescriptorPool, bytes::Bytes, prost_types::FileDescriptorProto};
use skysail_sandbox::http::{
    Event,
    grpc::{Client, Status},
};

/// Reflection services, the newest first. Their messages are the same.
const REFLECTION: [&str; 2] =
    ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"];
/// Maximum number of files, and of bytes in total, that a server may send.
const MAX_FILES: usize = 2_000;
const MAX_BYTES: usize = 64 << 20;

/// `ServerReflectionRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct ReflectionRequest {
    #[prost(oneof = "Question", tags = "3, 4, 7")]
    question: Option<Question>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub(super) enum Question {
    /// File of this name.
    #[prost(string, tag = "3")]
    File(String),
    /// File that defines this service.
    #[prost(string, tag = "4")]
    Symbol(String),
    /// Names of all services; the text has no meaning.
    #[prost(string, tag = "7")]
    Services(String),
}

/// `ServerReflectionResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct ReflectionResponse {
    #[prost(oneof = "ReflectionAnswer", tags = "4, 6, 7")]
    answer: Option<ReflectionAnswer>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum ReflectionAnswer {
    #[prost(message, tag = "4")]
    Files(Files),
    #[prost(message, tag = "6")]
    Services(Services),
    #[prost(message, tag = "7")]
    Error(Refusal),
}

/// `FileDescriptorResponse`: files, often with their imports.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Files {
    #[prost(bytes = "vec", repeated, tag = "1")]
    files: Vec<Vec<u8>>,
}

/// `ListServiceResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Services {
    #[prost(message, repeated, tag = "1")]
    services: Vec<Service>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Service {
    #[prost(string, tag = "1")]
    name: String,
}

/// `ErrorResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Refusal {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

/// Reflection client of a server.
pub(super) struct Reflection<'a> {
    pub(super) client: &'a mut Client,
    pub(super) server: &'a str,
    pub(super) headers: &'a [String],
}

impl Reflection<'_> {
    /// Queries the server. The error is of kind `InvalidInput` if the server has no reflection.
    pub(super) async fn query(&mut self, question: Question) -> io::Result<ReflectionAnswer> {
        let question = Bytes::from(ReflectionRequest { question: Some(question) }.encode_to_vec());
        for service in REFLECTION {
            let mut answer = None;
            let method = format!("{service}/ServerReflectionInfo");
            let mut on = |event: Event<'_>| {
                if let Event::Body(message) = event {
                    let message = ReflectionResponse::decode(message).map_err(unusable)?;
                    answer = answer.take().or(message.answer);
                }
                Ok(())
            };
            let status =
                self.client.call(&method, self.headers, std::slice::from_ref(&question), &mut on).await?;
            match (status.code, answer) {
                (Status::UNIMPLEMENTED, _) => {}
                (0, Some(answer)) => return Ok(answer),
                (0, None) => return Err(unusable("it is empty")),
                _ => return Err(io::Error::other(format!("server reflection: {status}"))),
            }
        }
        Err(wrong(format!(
            "{} has no server reflection; pass --descriptor-set FILE, which \
             `protoc --include_imports --descriptor_set_out=FILE X.proto` writes",
            self.server
        )))
    }
}

/// Reads the output of `protoc --include_imports --descriptor_set_out`.
pub(super) fn of_set(set: &[u8]) -> Result<DescriptorPool, String> {
    DescriptorPool::decode(set).map_err(|error| {
        format!("it is not the output of `protoc --include_imports --descriptor_set_out`: {error}")
    })
}

/// Returns the names of a server's services.
pub(super) async fn services(
    query: &mut impl AsyncFnMut(Question) -> io::Result<ReflectionAnswer>,
) -> io::Result<Vec<String>> {
    match query(Question::Services(String::new())).await? {
        ReflectionAnswer::Services(Services { services }) => {
            let names: BTreeSet<String> = services.into_iter().map(|service| service.name).collect();
            Ok(names.into_iter().collect())
        }
        ReflectionAnswer::Error(Refusal { message, .. }) => Err(unusable(message)),
        ReflectionAnswer::Files(_) => Err(unusable("it contains files instead of services")),
    }
}

/// Returns the descriptors of these services and of their dependencies.
pub(super) async fn of_services(
    names: &[String],
    query: &mut impl AsyncFnMut(Question) -> io::Result<ReflectionAnswer>,
) -> io::Result<DescriptorPool> {
    let mut files: BTreeMap<String, FileDescriptorProto> = BTreeMap::new();
    let mut questions: Vec<Question> = names.iter().cloned().map(Question::Symbol).collect();
    let (mut requested, mut size) = (BTreeSet::new(), 0);
    while let Some(question) = questions.pop() {
        let received = match query(question.clone()).await? {
            ReflectionAnswer::Files(Files { files }) => files,
            ReflectionAnswer::Error(refusal) => return Err(refused(&question, &refusal, query).await),
            ReflectionAnswer::Services(_) => return Err(unusable("it contains services instead of files")),
        };
        for file in received {
            size += file.len();
            if size > MAX_BYTES || files.len().max(requested.len()) > MAX_FILES {
                let limit = format!("it has more than {MAX_FILES} files or {} MiB", MAX_BYTES >> 20);
                return Err(unusable(limit));
            }
            let file = FileDescriptorProto::decode(&*file).map_err(unusable)?;
            files.insert(file.name().to_owned(), file);
        }
        let imports = files.values().flat_map(|file| &file.dependency);
        let missing: BTreeSet<&String> = imports.filter(|name| !files.contains_key(*name)).collect();
        for name in missing {
            if requested.insert(name.clone()) {
                questions.push(Question::File(name.clone()));
            }
        }
    }
    let mut pool = DescriptorPool::new();
    pool.add_file_descriptor_protos(files.into_values()).map_err(unusable)?;
    Ok(pool)
}

/// Returns the error for a query that the server refused. For an unknown service, it names the server's services.
async fn refused(
    question: &Question,
    refusal: &Refusal,
    query: &mut impl AsyncFnMut(Question) -> io::Result<ReflectionAnswer>,
) -> io::Error {
    let Refusal { code, message } = refusal;
    match question {
        Question::Symbol(name) if *code == 5 => match services(query).await {
            Ok(known) => unknown(format_args!("there is no service {name}; known services"), &known),
            Err(error) => error,
        },
        Question::Symbol(name) | Question::File(name) => unusable(format_args!("{name}: {message}")),
        Question::Services(_) => unusable(message),
    }
}

/// Returns the error about an unknown name, with the known ones.
pub(super) fn unknown(problem: impl std::fmt::Display, known: &[String]) -> io::Error {
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    wrong(format!("{problem}: {known}"))
}

/// Returns an error of the command line.
pub(super) fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn unusable(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("invalid response from server reflection: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, imports: &[&str], service: Option<&str>) -> Vec<u8> {
        let file = FileDescriptorProto {
            name: Some(name.to_owned()),
            package: Some("acme".to_owned()),
            dependency: imports.iter().map(|name| (*name).to_owned()).collect(),
            service: service
                .map(|name| prost_reflect::prost_types::ServiceDescriptorProto {
                    name: Some(name.to_owned()),
                    ..Default::default()
                })
                .into_iter()
                .collect(),
            ..FileDescriptorProto::default()
        };
        file.encode_to_vec()
    }

    fn files(files: Vec<Vec<u8>>) -> io::Result<ReflectionAnswer> {
        Ok(ReflectionAnswer::Files(Files { files }))
    }

    /// Returns the result for `acme.Flights` with these answers, and the queries.
    async fn read(
        answer: impl Fn(&Question) -> io::Result<ReflectionAnswer>,
    ) -> (Result<Vec<String>, String>, Vec<Question>) {
        let mut questions = Vec::new();
        let mut query = async |question: Question| {
            let answer = answer(&question);
            questions.push(question);
            answer
        };
        let pool = of_services(&["acme.Flights".to_owned()], &mut query).await;
        let names = pool.map(|pool| pool.services().map(|service| service.full_name().to_owned()).collect());
        (names.map_err(|error| error.to_string()), questions)
    }

    #[tokio::test]
    async fn imports_are_requested_once() {
        let (names, questions) = read(|question| match question {
            Question::Symbol(name) if name == "acme.Flights" => {
                files(vec![file("a", &["b", "c"], Some("Flights")), file("b", &["c"], None)])
            }
            Question::File(name) => files(vec![file(name, &[], None)]),
            other => panic!("{other:?}"),
        })
        .await;
        assert_eq!(names.unwrap(), ["acme.Flights"]);
        assert_eq!(questions, [Question::Symbol("acme.Flights".to_owned()), Question::File("c".to_owned())]);
    }

    #[tokio::test]
    async fn an_unknown_service_is_reported_with_the_known_ones() {
        let (names, _) = read(|question| match question {
            Question::Symbol(_) => Ok(ReflectionAnswer::Error(Refusal { code: 5, message: "no".to_owned() })),
            _ => {
                let service = |name: &str| Service { name: name.to_owned() };
                Ok(ReflectionAnswer::Services(Services {
                    services: vec![service("b"), service("a"), service("b")],
                }))
            }
        })
        .await;
        assert_eq!(names.unwrap_err(), "there is no service acme.Flights; known services: a, b");
    }

    #[tokio::test]
    async fn endless_and_invalid_answers_are_errors() {
        let next = std::cell::Cell::new(0);
        let (endless, questions) = read(|_| {
            next.set(next.get() + 1);
            files(vec![file(&next.get().to_string(), &[&(next.get() + 1).to_string()], None)])
        })
        .await;
        assert!(endless.unwrap_err().contains("more than 2000 files"));
        assert!(questions.len() <= MAX_FILES + 2);
        let (large, _) = read(|_| files(vec![vec![0x80; MAX_BYTES + 1]])).await;
        assert!(large.unwrap_err().contains("or 64 MiB"));
        let (broken, _) = read(|_| files(vec![b"\xff".to_vec()])).await;
        assert!(broken.unwrap_err().contains("invalid response from server reflection"));
        let (circle, _) = read(|question| match question {
            Question::Symbol(_) => {
                files(vec![file("a", &["b"], Some("Flights")), file("b", &["a", "b"], None)])
            }
            other => panic!("{other:?}"),
        })
        .await;
        // A cycle is harmless, and so is a long chain.
        assert_eq!(circle.unwrap(), ["acme.Flights"]);
        let (chain, _) = read(|question| match question {
            Question::Symbol(_) => files(vec![file("0", &["1"], Some("Flights"))]),
            Question::File(name) if name == "900" => files(vec![file(name, &[], None)]),
            Question::File(name) => {
                files(vec![file(name, &[&(name.parse::<u32>().unwrap() + 1).to_string()], None)])
            }
            other => panic!("{other:?}"),
        })
        .await;
        assert_eq!(chain.unwrap(), ["acme.Flights"]);
        let (missing, questions) = read(|question| match question {
            Question::Symbol(_) => files(vec![file("a", &["b"], Some("Flights"))]),
            _ => files(Vec::new()),
        })
        .await;
        assert!(missing.is_err() && questions.len() == 2, "{questions:?}");
        assert!(of_set(b"\xff").unwrap_err().contains("it is not the output of `protoc"));
    }

    #[test]
    fn messages_are_encoded_as_in_the_protocol() {
        let symbol = ReflectionRequest { question: Some(Question::Symbol("a".to_owned())) };
        assert_eq!(symbol.encode_to_vec(), [0x22, 1, b'a']);
        let list = ReflectionRequest { question: Some(Question::Services(String::new())) };
        assert_eq!(list.encode_to_vec(), [0x3a, 0]);
        let answer = [0x0a, 0, 0x12, 0, 0x32, 5, 0x0a, 3, 0x0a, 1, b'a'];
        let services = Services { services: vec![Service { name: "a".to_owned() }] };
        assert_eq!(
            ReflectionResponse::decode(&answer[..]).unwrap().answer,
            Some(ReflectionAnswer::Services(services))
        );
        let error = [0x3a, 5, 0x08, 5, 0x12, 1, b'x'];
        let refusal = Refusal { code: 5, message: "x".to_owned() };
        assert_eq!(
            ReflectionResponse::decode(&error[..]).unwrap().answer,
            Some(ReflectionAnswer::Error(refusal))
        );
    }
}
