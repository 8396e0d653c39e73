// A payment provider to try the workflows against, without money. It charges, counts, and can be told to misbehave.
//
//   node tests/n8n/provider.mjs PORT      ends with its standard input
//
// POST /charges {order_id, amount, reference?}   charges each time it is asked: no idempotency key
// GET  /charges?reference=R                      {"data": [charges with this reference]}
// POST /v1/payment_intents, Idempotency-Key      charges once a key, and repeats its answer (a form; metadata[order_id])
// POST /v2/checkout/orders, PayPal-Request-Id    the same, in JSON
// POST, PUT any other path                       keeps the message
//
// For tests: PUT /behaviour {of, answers: [{charge, status, retry_after, delay, drop, raw}, …]} sets what the next requests
// for an order, the next searches for a reference, or the next messages to the paths under one meet: charged (kept) or not,
// with this status and this Retry-After, after so many ms, the connection dropped, this text as the body. GET /requests tells
// what came, and when (ms); GET /messages gives the messages, DELETE /messages forgets them too.
import { createServer } from 'node:http';

const charges = [];
const messages = [];
const requests = [];
const behaviours = new Map();
// What each idempotency key was answered.
const answers = new Map();

const creations = {
  '/charges': (request) => ({ order_id: String(request.json.order_id), amount: request.json.amount, reference: request.json.reference }),
  '/v1/payment_intents': (request) => ({
    order_id: request.form.get('metadata[order_id]'), amount: Number(request.form.get('amount')) / 100,
    key: request.headers['idempotency-key'],
  }),
  '/v2/checkout/orders': (request) => ({
    order_id: request.json.purchase_units[0].reference_id, amount: Number(request.json.purchase_units[0].amount.value),
    key: request.headers['paypal-request-id'],
  }),
};

function create(wanted) {
  const charge = { id: `ch_${charges.length + 1}`, ...wanted };
  charges.push(charge);
  console.log(`charged ${charge.amount} for ${charge.order_id}: ${charge.id}`);
  return charge;
}

function answer(response, status, body, raw, retryAfter) {
  if (retryAfter !== undefined) response.setHeader('retry-after', retryAfter);
  response.writeHead(status, { 'content-type': raw === undefined || /^[[{]/.test(raw) ? 'application/json' : 'text/html' });
  response.end(raw ?? JSON.stringify(body));
}

function serve(request, response) {
  const { pathname, searchParams } = new URL(request.url, 'http://provider');
  const creation = request.method === 'POST' && creations[pathname];
  if (creation) {
    const wanted = creation(request);
    const { charge = true, status = 201, retry_after: retryAfter, delay = 0, drop = false, raw } = behaviours.get(wanted.order_id)?.shift() ?? {};
    requests.push({ ...wanted, path: pathname, at: Date.now() });
    const stored = answers.get(wanted.key);
    const body = stored?.body ?? (charge ? create(wanted) : { message: 'told to misbehave' });
    // As Stripe does: refusals are repeated too, but not what was turned away before it was looked at.
    if (wanted.key && !stored && status !== 429) answers.set(wanted.key, { status: charge ? 201 : status, body });
    const replied = stored && status === 201 ? stored.status : status;
    return setTimeout(() => (drop ? request.socket.destroy() : answer(response, replied, body, raw, retryAfter)), delay);
  }
  switch (`${request.method} ${pathname}`) {
    case 'GET /charges': {
      const reference = searchParams.get('reference');
      const { status = 200, raw } = behaviours.get(reference)?.shift() ?? {};
      const found = charges.filter((charge) => reference === null || charge.reference === reference);
      return answer(response, status, { data: found }, raw);
    }
    case 'GET /requests': return answer(response, 200, requests);
    case 'GET /messages': return answer(response, 200, messages);
    case 'DELETE /messages': return answer(response, 200, messages.splice(0));
    case 'PUT /behaviour':
      behaviours.set(request.json.of, request.json.answers);
      return answer(response, 200, {});
    default: {
      if (!['POST', 'PUT'].includes(request.method)) return answer(response, 404, { message: 'unknown path' });
      const { charge = true, status = 200, delay = 0 } = behaviours.get(`/${pathname.split('/')[1]}`)?.shift() ?? {};
      if (charge) messages.push({ path: pathname, ...request.json });
      return setTimeout(() => answer(response, status, {}), delay);
    }
  }
}

const server = createServer(async (request, response) => {
  try {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const text = Buffer.concat(chunks).toString();
    if (request.headers['content-type']?.startsWith('application/json')) request.json = JSON.parse(text);
    else request.form = new URLSearchParams(text);
    serve(request, response);
  } catch (fault) {
    answer(response, 400, { message: String(fault) });
  }
});

server.listen(Number(process.argv[2]), '127.0.0.1', () => console.log(`provider on http://127.0.0.1:${server.address().port}`));
process.stdin.resume().on('end', () => process.exit());
