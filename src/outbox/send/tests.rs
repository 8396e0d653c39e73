use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use chrono::TimeDelta;

use super::*;

const SECRET: &str = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// How long a receiver may take where it is to answer: the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a server got: the head's lines in lower case but for their values, and the body.
struct Received {
    head: Vec<String>,
    body: Vec<u8>,
}

impl Received {
    fn header(&self, name: &str) -> Option<&str> {
        let values = self.head.iter().skip(1);
        values
            .filter_map(|line| line.split_once(": "))
            .find(|(found, _)| found.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }
}

fn receive(reader: &mut impl BufRead) -> Option<Received> {
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        match line.trim_end() {
            "" => break,
            line => head.push(line.to_owned()),
        }
    }
    let mut received = Received {
        head,
        body: Vec::new(),
    };
    let length = received.header("content-length").unwrap().parse().unwrap();
    received.body.resize(length, 0);
    reader.read_exact(&mut received.body).ok()?;
    Some(received)
}

/// A server that hands over what it gets, and has `answer` answer. It counts its connections by
/// what it hands over with each request.
fn serve(
    answer: impl Fn(&mut TcpStream) + Clone + Send + 'static,
) -> (u16, Receiver<(usize, Received)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for (connection, number) in listener.incoming().zip(1..) {
            let (sender, answer) = (sender.clone(), answer.clone());
            thread::spawn(move || {
                let mut connection = connection.unwrap();
                let mut reader = BufReader::new(connection.try_clone().unwrap());
                while let Some(received) = receive(&mut reader) {
                    let _ = sender.send((number, received));
                    answer(&mut connection);
                }
            });
        }
    });
    (port, receiver)
}

/// A server that always says the same.
fn serve_text(text: impl Into<String>) -> (u16, Receiver<(usize, Received)>) {
    let text = text.into();
    serve(move |connection| {
        let _ = connection.write_all(text.as_bytes());
    })
}

fn sender(secrets: &str) -> Sender {
    let secrets = match secrets {
        "" => Vec::new(),
        list => SigningSecret::parse_list(list).unwrap(),
    };
    Sender::new(secrets, Vec::new(), PATIENCE).unwrap()
}

async fn send_by(sender: &Sender, url: &str) -> Sent {
    let message = Message {
        url: &Url::parse(url).unwrap(),
        id: "msg_1",
        topic: "order.paid",
        idempotency_key: "order:1",
        timestamp: 1_614_265_330,
        body: Bytes::from_static(b"{\"b\": 1.0, \"a\":\"\xc3\xa9\"}"),
    };
    sender.send(&message).await
}

/// What becomes of a delivery to a server at `port`.
async fn send(port: u16) -> Sent {
    send_by(&sender(""), &format!("http://127.0.0.1:{port}/")).await
}

#[actix_web::test]
async fn a_delivery_says_what_it_is_and_comes_byte_for_byte() {
    let (port, received) = serve_text(OK);
    let sender = sender(SECRET);
    let url = format!("http://user:p%40ss@127.0.0.1:{port}/hook/%7Ex?token=a%2Cb");
    let sent = send_by(&sender, &url).await;
    assert!(sent.is_delivered() && !sent.is_gone(), "{sent:?}");
    assert_eq!((sent.status, sent.retry_after), (Some(200), None));

    let (_, received) = received.recv().unwrap();
    assert_eq!(received.head[0], "POST /hook/%7Ex?token=a%2Cb HTTP/1.1");
    assert_eq!(received.body, b"{\"b\": 1.0, \"a\":\"\xc3\xa9\"}");
    for (name, value) in [
        ("content-type", "application/json"),
        ("user-agent", USER_AGENT),
        ("authorization", "Basic dXNlcjpwQHNz"),
        ("webhook-id", "msg_1"),
        ("webhook-timestamp", "1614265330"),
        ("x-dedup-gate-topic", "order.paid"),
        ("x-dedup-gate-key", "order:1"),
    ] {
        assert_eq!(received.header(name), Some(value), "{name}");
    }
    let secrets = SigningSecret::parse_list(SECRET).unwrap();
    let expected = signatures(&secrets, "msg_1", 1_614_265_330, &received.body);
    let signature = received.header("webhook-signature");
    assert_eq!(signature, Some(expected.as_str()));
}

#[actix_web::test]
async fn without_a_secret_nothing_is_signed() {
    let (port, received) = serve_text(OK);
    assert!(send(port).await.is_delivered());
    let (_, received) = received.recv().unwrap();
    assert_eq!(received.header("webhook-signature"), None);
}

#[actix_web::test]
async fn any_key_goes_into_a_header() {
    let (port, received) = serve_text(OK);
    let url = Url::parse(&format!("http://127.0.0.1:{port}/")).unwrap();
    let message = Message {
        url: &url,
        id: "msg_1",
        topic: "order.paid",
        idempotency_key: "100% é\u{7f}\n\"x\"",
        timestamp: 0,
        body: Bytes::from_static(b"{}"),
    };
    assert!(sender("").send(&message).await.is_delivered());
    let (_, received) = received.recv().unwrap();
    let key = received.header("x-dedup-gate-key");
    assert_eq!(key, Some("100%25%20%C3%A9%7F%0A\"x\""));
}

#[actix_web::test]
async fn a_connection_is_used_again() {
    let (port, received) = serve_text(OK);
    let (failing, failures) = serve_text("HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno");
    let sender = sender("");
    for _ in 0..3 {
        let url = format!("http://127.0.0.1:{port}/");
        assert!(send_by(&sender, &url).await.is_delivered());
        let url = format!("http://127.0.0.1:{failing}/");
        assert!(!send_by(&sender, &url).await.is_delivered());
    }
    for received in [received, failures] {
        let numbers: Vec<usize> = received.try_iter().map(|(number, _)| number).collect();
        assert_eq!(numbers, [1, 1, 1]);
    }
}

#[actix_web::test]
async fn hundreds_are_sent_at_a_time() {
    let slow = |connection: &mut TcpStream| {
        thread::sleep(Duration::from_millis(300));
        let _ = connection.write_all(OK.as_bytes());
    };
    // The standard library's listeners hold 128 connections that wait to be accepted.
    let servers = [serve(slow), serve(slow)];
    let sender = std::rc::Rc::new(sender(""));
    let begin = Instant::now();
    let tasks: Vec<_> = (0..200)
        .map(|number| {
            let (port, _) = servers[number % servers.len()];
            let (sender, url) = (sender.clone(), format!("http://localhost:{port}/"));
            actix_web::rt::spawn(async move { send_by(&sender, &url).await })
        })
        .collect();
    for sent in join_all(tasks).await {
        let sent = sent.unwrap();
        assert!(sent.is_delivered(), "{sent:?}");
    }
    assert!(begin.elapsed() < PATIENCE);
}

#[actix_web::test]
async fn any_other_status_is_a_failure() {
    for (status, fault) in [
        (301, "redirected (301)"),
        (304, "redirected (304)"),
        (400, "answered 400"),
        (404, "answered 404"),
        (410, "answered 410"),
        (500, "answered 500"),
        (503, "answered 503"),
    ] {
        let (port, _received) = serve_text(format!(
            "HTTP/1.1 {status} hunter2\r\nContent-Length: 0\r\n\r\n"
        ));
        let sent = send(port).await;
        assert!(!sent.is_delivered());
        assert_eq!(sent.is_gone(), status == 410);
        assert_eq!(sent.status, Some(status));
        assert_eq!(sent.fault.as_deref(), Some(fault));
    }
    for status in [201, 202, 204, 299] {
        let (port, _received) =
            serve_text(format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n"));
        assert!(send(port).await.is_delivered(), "{status}");
    }
}

#[actix_web::test]
async fn a_redirect_is_not_followed() {
    let (elsewhere, asked) = serve_text(OK);
    for status in [301, 302, 303, 307, 308] {
        let (port, _received) = serve_text(format!(
            "HTTP/1.1 {status} x\r\nLocation: http://127.0.0.1:{elsewhere}/\r\nContent-Length: 0\r\n\r\n"
        ));
        let sent = send(port).await;
        assert_eq!(sent.fault, Some(format!("redirected ({status})")));
    }
    assert_eq!(asked.try_iter().count(), 0);
}

#[actix_web::test]
async fn how_long_to_wait_is_read_from_failures() {
    let answer = |status: u16, wait: &str| {
        let text =
            format!("HTTP/1.1 {status} x\r\nRetry-After: {wait}\r\nContent-Length: 0\r\n\r\n");
        let (port, _received) = serve_text(text);
        async move { send(port).await.retry_after.map(|wait| wait.as_secs()) }
    };
    let date = (Utc::now() + TimeDelta::seconds(100)).into();
    let date = httpdate::fmt_http_date(date);
    assert_eq!(answer(429, "7").await, Some(7));
    assert_eq!(answer(302, "7").await, Some(7));
    let left = answer(503, &date).await.unwrap();
    assert!((95..=100).contains(&left), "{left}");
    let past = "Sun, 06 Nov 1994 08:49:37 GMT";
    assert_eq!(answer(503, past).await, Some(0));
    assert_eq!(answer(503, "soon").await, None);
    assert_eq!(answer(503, "99999999999999999999").await, None);
    assert_eq!(answer(200, "7").await, None);
}

#[actix_web::test]
async fn who_does_not_answer_in_time_has_failed() {
    let timeout = Duration::from_millis(1500);
    let silent = serve(|_| thread::sleep(Duration::from_secs(60)));
    let slow = serve(|connection| {
        for byte in OK.bytes() {
            let _ = connection.write_all(&[byte]);
            thread::sleep(Duration::from_millis(200));
        }
    });
    for (port, _received) in [silent, slow] {
        let sender = Sender::new(Vec::new(), Vec::new(), timeout).unwrap();
        let sent = send_by(&sender, &format!("http://127.0.0.1:{port}/")).await;
        assert_eq!(sent.status, None);
        assert_eq!(sent.fault.as_deref(), Some("no answer within 1.5 s"));
        assert!(sent.took >= timeout && sent.took < timeout * 3, "{sent:?}");
    }
}

#[actix_web::test]
async fn who_breaks_off_has_failed() {
    for text in ["", "HTTP/1.1 200 OK\r\nContent-Le", "HTTP/1.1 2"] {
        let (port, _received) = serve(move |connection| {
            let _ = connection.write_all(text.as_bytes());
            let _ = connection.shutdown(std::net::Shutdown::Both);
        });
        let sent = send(port).await;
        assert_eq!(sent.status, None, "{text}");
        let fault = sent.fault.unwrap();
        assert!(fault.contains("closed"), "{fault}");
    }
    let (port, _received) = serve_text("SSH-2.0-hunter2\r\n");
    let fault = send(port).await.fault.unwrap();
    assert!(!fault.contains("hunter2"), "{fault}");
}

#[actix_web::test]
async fn once_it_is_answered_2xx_nothing_can_go_wrong() {
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n";
    let endless = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let flood = move |connection: &mut TcpStream| {
        let _ = connection.write_all(endless.as_bytes());
        while connection
            .write_all(format!("1000\r\n{}\r\n", "x".repeat(4096)).as_bytes())
            .is_ok()
        {}
    };
    let drip = move |connection: &mut TcpStream| {
        let _ = connection.write_all(endless.as_bytes());
        while connection.write_all(b"1\r\nx\r\n").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    };
    let silence = move |connection: &mut TcpStream| {
        let _ = connection.write_all(head.as_bytes());
        thread::sleep(Duration::from_secs(60));
    };
    let break_off = move |connection: &mut TcpStream| {
        let _ = connection.write_all(head.as_bytes());
        let _ = connection.shutdown(std::net::Shutdown::Both);
    };
    for (port, _received) in [serve(flood), serve(drip), serve(silence), serve(break_off)] {
        let begin = Instant::now();
        let sent = send(port).await;
        assert!(sent.is_delivered(), "{sent:?}");
        assert!(begin.elapsed() < PATIENCE / 3);
    }
}

#[actix_web::test]
async fn a_fault_says_what_is_wrong_and_nothing_of_the_url() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let closed = closed.unwrap().port();
    let (plain, _received) = serve_text(OK);
    // Too long for DNS, so that nobody is asked for it.
    let no_name = "x".repeat(64);
    for (url, expected) in [
        (
            format!("http://127.0.0.1:{closed}/hunter2?hunter2"),
            "connection refused",
        ),
        (
            format!("http://hunter2:hunter2@{no_name}.invalid/hunter2"),
            "the name cannot be resolved",
        ),
        (format!("https://127.0.0.1:{plain}/hunter2"), "TLS: "),
    ] {
        let sent = send_by(&sender(""), &url).await;
        assert_eq!(sent.status, None);
        let fault = sent.fault.unwrap();
        assert!(fault.starts_with(expected), "{fault}");
        assert!(!fault.contains("hunter2"), "{fault}");
    }
}

// Names that lead where they must not.

fn careful(allowed: &[&str]) -> Sender {
    let allowed = allowed.iter().map(ToString::to_string).collect();
    Sender::with_rule(Vec::new(), allowed, PATIENCE, |address| {
        address.is_loopback()
    })
    .unwrap()
}

#[actix_web::test]
async fn a_name_that_leads_to_a_forbidden_address_is_not_connected_to() {
    let (port, received) = serve_text(OK);
    let url = format!("http://localhost:{port}/hunter2");
    let sent = send_by(&careful(&[]), &url).await;
    let fault = "the name leads to a link-local address or a cloud's metadata";
    assert_eq!(sent.fault.as_deref(), Some(fault));
    assert_eq!(received.try_iter().count(), 0);

    assert!(send_by(&careful(&["localhost"]), &url).await.is_delivered());
}

#[actix_web::test]
async fn a_name_that_leads_to_a_forbidden_address_is_refused_at_start() {
    let text = "a=http://no-such-host.invalid/,b=http://127.0.0.1/,c=http://LocalHost/hunter2";
    let routes = Routes::parse(text, &[]).unwrap();
    let refused = careful(&[]).check(&routes).await.unwrap_err();
    assert!(refused.starts_with("OUTBOX_ROUTES: "), "{refused}");
    assert!(refused.contains("entry 3"), "{refused}");
    assert!(!refused.contains("hunter2"), "{refused}");
    assert_eq!(careful(&["localhost"]).check(&routes).await, Ok(()));
    assert_eq!(sender("").check(&routes).await, Ok(()));
}

// What only a process of its own can show: the environment, and the log.

/// The port of a server, in the environment of such a process.
const PORT: &str = "TEST_PORT";

/// Runs a test that is otherwise ignored with a server at `port`, and gives what it logged.
fn run_apart(test: &str, port: u16, environment: &[(&str, &std::ffi::OsStr)]) -> String {
    let name = format!("outbox::send::tests::{test}");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--ignored", "--nocapture"])
        .env(PORT, port.to_string())
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
    said
}

/// The server's port; none where whoever runs all that is ignored has no server.
fn port_apart() -> Option<u16> {
    Some(std::env::var(PORT).ok()?.parse().unwrap())
}

#[test]
fn no_proxy_is_taken_from_the_environment() {
    let (port, _received) = serve_text(OK);
    let (proxy, asked) = serve_text(OK);
    let proxy = format!("http://127.0.0.1:{proxy}");
    let names = ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"];
    let environment = names.map(|name| (name, proxy.as_ref()));
    run_apart("apart_it_delivers", port, &environment);
    assert_eq!(asked.try_iter().count(), 0);
}

#[actix_web::test]
#[ignore = "no_proxy_is_taken_from_the_environment runs it"]
async fn apart_it_delivers() {
    if let Some(port) = port_apart() {
        assert!(send(port).await.is_delivered());
    }
}

#[test]
fn no_url_is_logged_at_any_level() {
    let (port, _received) = serve_text(
        "HTTP/1.1 302 hunter2\r\nLocation: /hunter2\r\nX: hunter2\r\nContent-Length: 7\r\n\r\nhunter2",
    );
    let log = run_apart("apart_it_logs_everything", port, &[]);
    assert!(log.contains("TRACE"), "{log}");
    assert!(!log.contains("hunter2"), "{log}");
}

#[actix_web::test]
#[ignore = "no_url_is_logged_at_any_level runs it"]
async fn apart_it_logs_everything() {
    let Some(port) = port_apart() else {
        return;
    };
    env_logger::Builder::new()
        .filter_level(log::LevelFilter::Trace)
        .init();
    for host in [
        format!("127.0.0.1:{port}"),
        format!("localhost:{port}"),
        "127.0.0.1:1".into(),
        "no-such-host.invalid".into(),
    ] {
        for scheme in ["http", "https"] {
            let url = format!("{scheme}://hunter2:hunter2@{host}/hunter2?hunter2");
            assert!(!send_by(&sender(SECRET), &url).await.is_delivered());
        }
    }
}

// TLS.

fn openssl(folder: &tempfile::TempDir, arguments: &str) {
    let output = Command::new("openssl")
        .args(arguments.split_whitespace())
        .current_dir(folder)
        .output()
        .expect("openssl is needed: scripts/test installs it");
    assert!(output.status.success(), "{arguments}: {output:?}");
}

/// A server with a certificate for `localhost` that it has signed itself, and the certificate's file.
fn serve_tls(folder: &tempfile::TempDir) -> (u16, std::path::PathBuf) {
    openssl(
        folder,
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
         -subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout own.key -out own.crt",
    );
    let file = |name: &str| folder.path().join(name);
    let read = |name: &str| std::fs::read(file(name)).unwrap();
    let identity = native_tls::Identity::from_pkcs8(&read("own.crt"), &read("own.key")).unwrap();
    let acceptor = native_tls::TlsAcceptor::new(identity).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let Ok(stream) = acceptor.accept(connection.unwrap()) else {
                continue;
            };
            let mut reader = BufReader::new(stream);
            while receive(&mut reader).is_some() {
                let _ = reader.get_mut().write_all(OK.as_bytes());
            }
        }
    });
    (port, file("own.crt"))
}

#[actix_web::test]
async fn a_certificate_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (port, _) = serve_tls(&folder);
    let sent = send_by(&sender(""), &format!("https://localhost:{port}/")).await;
    assert_eq!(sent.fault.as_deref(), Some("TLS: self-signed certificate"));
}

#[test]
fn ssl_cert_file_says_which_certificates_to_trust() {
    let folder = tempfile::tempdir().unwrap();
    let (port, certificate) = serve_tls(&folder);
    let environment = [("SSL_CERT_FILE", certificate.as_os_str())];
    run_apart("apart_it_trusts_localhost", port, &environment);
}

#[actix_web::test]
#[ignore = "ssl_cert_file_says_which_certificates_to_trust runs it"]
async fn apart_it_trusts_localhost() {
    let Some(port) = port_apart() else {
        return;
    };
    let sent = send_by(&sender(""), &format!("https://localhost:{port}/")).await;
    assert!(sent.is_delivered(), "{sent:?}");
    let sent = send_by(&sender(""), &format!("https://127.0.0.1:{port}/")).await;
    assert_eq!(sent.fault.as_deref(), Some("TLS: IP address mismatch"));
}
