export type Node = unknown;
export function h(type: unknown, props: object | null, ...children: unknown[]): Node;
export function render(node: Node, parent: Element | null): void;
